"""What is measured: named workloads, and their sweep over models, dtypes and shapes. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from warpline.config import ModelConfig
from warpline.errors import ConfigError, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure. `kind` says what: a whole generation, its decode steps alone, the prompt alone, a new
    process (to its first token, or its peak memory), or many requests at once: then `batch` is their number, and
    `prompt` and `new` are the mean lengths."""

    workload: str
    kind: str
    model: str
    dtype: str
    batch: int = 1
    prompt: int = 16
    new: int = 100
    window: int | None = None

    @property
    def label(self) -> str:
        """The case in one line: "reference, random:gpt2 fp16, 1 × (16 + 100)"."""
        tokens = f"{self.prompt}" if self.kind == "prefill" else f"({self.prompt} + {self.new})"
        window = f", window {self.window}" if self.window else ""
        if self.kind == "throughput":
            shape = f"{self.batch:,} requests of about {self.prompt} + {self.new} tokens"
            return f"{self.workload}, {self.model} {self.dtype}, {shape}{window}"
        return f"{self.workload}, {self.model} {self.dtype}, {self.batch} × {tokens}{window}"

    def windowed(self, config: ModelConfig) -> ModelConfig:
        """Return the model's config with the window of this case, if it has one."""
        return config if self.window is None else replace(config, window=self.window)

    def obstacle(self, config: ModelConfig) -> str | None:
        """Return why the model cannot run this case; None if it can."""
        length = self.prompt if self.kind == "prefill" else self.prompt + self.new
        if length > config.n_positions:
            return f"{length:,} positions are more than the model's {config.n_positions:,}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A name for some shapes: tuples of batch, prompt and new tokens."""

    name: str
    summary: str
    kind: str = "generate"
    shapes: tuple[tuple[int, int, int], ...]  # (batch, prompt, new)
    cpu_shapes: tuple[tuple[int, int, int], ...] | None = None  # used on a CPU where the others take too long


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="reference", summary="prompt 16, 100 new tokens, batch 1", shapes=((1, 16, 100),)),
        Workload(
            name="decode",
            summary="128 tokens after contexts of 16 to 896, the prompt's time left out",
            kind="decode",
            shapes=tuple((1, depth, 128) for depth in (16, 256, 512, 768, 896)),
        ),
        Workload(name="long", summary="900 tokens into a context of 1,024", shapes=((1, 124, 900),)),
        Workload(
            name="prefill",
            summary="the first token after 1×128, 1×1024 and 16×1024",
            kind="prefill",
            shapes=((1, 128, 0), (1, 1024, 0), (16, 1024, 0)),
        ),
        Workload(
            name="batch",
            summary="8, 64 and 256 sequences, prompt 16, 100 new tokens",
            shapes=tuple((b, 16, 100) for b in (8, 64, 256)),
        ),
        Workload(
            name="throughput",
            summary="1,024 requests at once, of about 225 + 202 tokens, no two alike (on a CPU 64, of about 32 + 24)",
            kind="throughput",
            shapes=((1024, 225, 202),),
            cpu_shapes=((64, 32, 24),),
        ),
        Workload(
            name="coldstart",
            summary="a new process to its first token, with what it keeps on disk cold and warm",
            kind="coldstart",
            shapes=((1, 16, 1),),
        ),
        Workload(
            name="memory",
            summary="peak memory: on a GPU what was allocated, else of the process",
            kind="memory",
            shapes=((1, 16, 100),),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How thoroughly to measure."""

    device: str
    repetitions: int = 10
    budget_seconds: float = 20.0  # of a case, once every method is warm
    patience_seconds: float = 60.0  # of one generation
    limit_seconds: float = math.inf  # of the whole run: cases that have not begun by then are left out

    @property
    def impatience(self) -> str:
        """The reason given for a method that takes longer."""
        return f"more than {self.patience_seconds:g} s for one generation: --patience allows it"


def cases(
    names: Sequence[str],
    *,
    models: Sequence[str],
    dtypes: Sequence[str],
    batches: Sequence[int] = (),
    prompts: Sequence[int] = (),
    new: Sequence[int] = (),
    windows: Sequence[int | None] = (None,),
    on_cpu: bool = False,
) -> list[Case]:
    """Return the sweep: each workload's shapes, overridden by the given ones, for every model, dtype and window."""
    for what, values in (("batch", batches), ("prompt", prompts), ("new tokens", new)):
        if any(value < 1 for value in values):
            raise ConfigError(f"{what} must be at least 1, not {min(values)}")
    found: dict[Case, None] = {}
    workloads = [WORKLOADS[one_of(name, WORKLOADS, "workload")] for name in names]
    for model, dtype, workload, window in itertools.product(models, dtypes, workloads, windows):
        shapes = workload.cpu_shapes if on_cpu and workload.cpu_shapes is not None else workload.shapes
        for batch, prompt, count in shapes:
            for b, p, n in itertools.product(batches or (batch,), prompts or (prompt,), new or (count,)):
                case = Case(
                    workload=workload.name,
                    kind=workload.kind,
                    model=model,
                    dtype=dtype,
                    batch=b,
                    prompt=p,
                    new=0 if workload.kind == "prefill" else n,
                    window=window,
                )
                found[case] = None
    return list(found)
