"""The persistent kernel's own clocks: one launch decodes many tokens, so nothing outside can see its stages. A program
compiled with stamps writes its clock at the end of every stage of every layer, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from warpline.kernels.persistent import LAYER_STAMPS, TOKEN_STAMPS
from warpline.profile.names import stamp_path
from warpline.profile.session import KernelRow, Launches, ModulePath, Moment, Phase, SpanRow, Work

if TYPE_CHECKING:
    from torch import Tensor

    from warpline.bench.methods.ours import OnPersistent

ENTRY = "warpline_decode"


def stages(layers: int) -> list[ModulePath]:
    """The modules of a token's stamps, in order."""
    found = [stamp_path(stamp, layer) for layer in range(layers) for stamp in LAYER_STAMPS]
    return found + [stamp_path(stamp, None) for stamp in TOKEN_STAMPS]


def stage_times(clocks: Sequence[Sequence[int]], count: int, token_us: float) -> list[tuple[float, float, float]]:
    """Mean, shortest and longest µs of each of `count` stages. Each block's clocks hold some tokens one behind the
    other, of which the first only begins the measurement. A clock is compared with itself alone; cycles become µs
    because the mean token is known to take `token_us`."""
    tokens = len(clocks[0]) // count
    if tokens < 2:
        raise ValueError("stamps of two tokens are needed: the first one's begin is not stamped")
    cycles = [[0.0] * len(clocks) for _ in range(count)]
    for block, values in enumerate(clocks):
        for i in range(count, tokens * count):
            cycles[i % count][block] += (values[i] - values[i - 1]) / (tokens - 1)
    whole = sum(sum(stage) for stage in cycles) / len(clocks)
    scale = token_us / whole
    return [(scale * sum(s) / len(s), scale * min(s), scale * max(s)) for s in cycles]


def decode_phase(method: OnPersistent, prompts: Tensor, steps: int, plain_us: float, work: Work) -> Phase:
    """Run the method with a stamped program, and read its clocks."""
    import torch

    from warpline.bench.protocol import timed
    from warpline.engine.persistent_exec import PersistentExecutor

    executor = method._executor
    assert isinstance(executor, PersistentExecutor)
    config, before = executor.config, executor.extents
    modules = stages(config.n_layer)
    tokens = steps + 1
    executor.extents = replace(before, stamped_tokens=tokens)
    executor.stamps = torch.zeros(before.blocks, tokens * len(modules), dtype=torch.int64, device=executor.device)
    try:
        method.generate(prompts, 1 + tokens)  # compiles, and is not counted
        first = min(timed(lambda: method.generate(prompts, 1), executor.device) for _ in range(3))
        whole = [timed(lambda: method.generate(prompts, 1 + tokens), executor.device) for _ in range(3)]
        clocks: Any = executor.stamps.cpu().tolist()
    finally:
        executor.extents, executor.stamps = before, None
    step_us = 1e6 * (sorted(whole)[1] - first) / tokens
    each = stage_times(clocks, len(modules), step_us)
    return stamped_phase(modules, each, steps, step_us, plain_us, work)


def stamped_phase(
    modules: Sequence[ModulePath],
    each: Sequence[tuple[float, float, float]],
    steps: int,
    step_us: float,
    plain_us: float,
    work: Work,
) -> Phase:
    """A phase of stages: they follow one another without gaps, in one kernel."""
    spans = tuple(SpanRow(path, mean, 0.0) for path, (mean, _, _) in zip(modules, each, strict=True))
    moments, at = [Moment("step", "step 1", (), 0.0, sum(mean for mean, _, _ in each))], 0.0
    for path, (mean, _, _) in zip(modules, each, strict=True):
        moments.append(Moment("gpu", path[-1], path, at, mean))
        at += mean
    launch = 1 / (steps + 1)
    return Phase(
        name="decode",
        source="stamps",
        steps=steps,
        step_us=step_us,
        fastest_us=step_us,
        slowest_us=step_us,
        plain_us=plain_us,
        work=work,
        spans=spans,
        kernels=(KernelRow(ENTRY, (), launch, step_us, step_us),),
        launches=Launches(count=launch, kernels=launch),
        timeline=tuple(moments),
    )
