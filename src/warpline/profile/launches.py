"""How busy the device is, how long its gaps are, and what a step would take without them. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from warpline.profile.classify import classify
from warpline.profile.names import BLOCKS, merged
from warpline.profile.session import ModulePath, Phase, Session


@dataclass(frozen=True, slots=True)
class Overhead:
    """Launches, kernels and gaps of one step."""

    step_us: float
    busy_us: float
    gap_us: float
    launches: float
    kernels: float
    host_us_per_launch: float | None

    @property
    def busy_share(self) -> float:
        """Share of the time in which something is computed."""
        return self.busy_us / self.step_us


def overhead(phase: Phase) -> Overhead:
    """Return a phase's launches and gaps."""
    count = phase.launches.count
    each = phase.launches.host_us / count if count and phase.launches.host_us else None
    return Overhead(phase.step_us, phase.busy_us, phase.gap_us, count, phase.launches.kernels, each)


@dataclass(frozen=True, slots=True)
class KernelLine:
    """A kernel over all layers: per step, and for each block of the model."""

    name: str
    kind: str
    module: ModulePath
    calls: float
    us: float
    mean_us: float
    share: float
    per_layer: float | None


def kernel_table(session: Session, phase: Phase) -> list[KernelLine]:
    """Return every kernel with its module, layers merged, the longest first. Shares are of the busy time."""
    groups: dict[tuple[str, ModulePath], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in phase.kernels:
        entry = groups[row.name, merged(row.path)]
        for i, value in enumerate((row.calls, row.us, row.duration_us)):
            entry[i] += value
    busy, layers = phase.busy_us or 1.0, session.config.n_layer
    lines = [
        KernelLine(
            name=name,
            kind=classify(name),
            module=path,
            calls=calls,
            us=us,
            mean_us=duration / calls,
            share=us / busy,
            per_layer=calls / layers if path[:1] == (BLOCKS,) else None,
        )
        for (name, path), (calls, us, duration) in groups.items()
    ]
    return sorted(lines, key=lambda line: -line.us)
