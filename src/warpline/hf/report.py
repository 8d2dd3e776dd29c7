"""The result of `patch`: what was replaced, what was left and why, and by how much the logits moved."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Report:
    """The result of `patch`; as a string it is a readable summary. It keeps counting calls of `generate`."""

    transformers: str
    dtype: str
    device: str
    #: Part of the model → what computes it now.
    replaced: dict[str, str] = field(default_factory=dict)
    #: Part of the model → why it was left.
    left: dict[str, str] = field(default_factory=dict)
    #: Largest change of a logit on the probe, the limit for the dtype, and the logits' standard deviation.
    difference: float = 0.0
    allowed: float = 0.0
    spread: float = 0.0
    #: The largest change with fast_math if it was requested; it is reported, not limited.
    fast_math_difference: float | None = None
    #: Outcomes of `generate` calls, "engine" or why the original method ran → their number.
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, outcome: str) -> None:
        """Count a call of `generate`."""
        self.calls[outcome] = self.calls.get(outcome, 0) + 1

    def __str__(self) -> str:
        lines = [f"transformers {self.transformers}, {self.dtype} on {self.device}"]
        lines += [f"  replaced  {part}: {what}" for part, what in self.replaced.items()]
        lines += [f"  left      {part}: {why}" for part, why in self.left.items()]
        if self.device == "cpu":
            lines.append("  on a CPU the kernels run as their references: the same results, not faster")
        limits = f"allowed {self.allowed:.3g}, their spread {self.spread:.3g}"
        lines.append(f"  logits moved by at most {self.difference:.3g} ({limits})")
        if self.fast_math_difference is not None:
            lines.append(f"  with fast_math by at most {self.fast_math_difference:.3g}")
        if self.dtype not in ("float32", "fp32"):
            lines.append("  in half precision texts can part where two tokens are as likely as each other")
        lines += [f"  generate  {count} × {outcome}" for outcome, count in self.calls.items()]
        return "\n".join(lines)
