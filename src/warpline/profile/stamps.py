"""Clocks inside code that decodes many tokens in one launch or call, where stages cannot be seen from outside: the
blocks of the persistent kernel and the threads of the cpu executor record one after every stage of every layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from warpline.profile.names import stamp_path
from warpline.profile.session import KernelRow, Launches, ModulePath, Moment, Phase, SpanRow, Work

if TYPE_CHECKING:
    from warpline.bench.methods.base import Moments, Stamped

ENTRY = "warpline_decode"
#: Launches that are timed.
RUNS = 5


def stages(layers: int, moments: Moments) -> list[ModulePath]:
    """Return the modules of a token's moments, in order."""
    found = [stamp_path(moment, layer) for layer in range(layers) for moment in moments.layer]
    first, last = ([stamp_path(moment, None) for moment in some] for some in (moments.first, moments.last))
    return first + found + last


def kernel_name(path: ModulePath) -> str:
    """Return the name of a stage in the table of kernels."""
    return f"{ENTRY}: {path[-1]}"


def stage_times(clocks: Sequence[Sequence[int]], count: int, token_us: float) -> list[tuple[float, float, float]]:
    """Return mean, shortest and longest µs of each of `count` stages. Each block's clocks hold several tokens one after
    the other; the first one only begins the measurement. A clock is compared only with itself; cycles become µs because
    the mean token is known to take `token_us`."""
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


def decode_phase(
    stamped: Stamped, layers: int, steps: int, plain_us: float | None, work: Work, *, track: str = "gpu"
) -> Phase:
    """Return the phase that the clocks show, in the time of the launches; `plain_us` is that of an unrecorded step."""
    modules, clocks = stages(layers, stamped.moments), stamped.clocks.tolist()
    each = stage_times(clocks, len(modules), statistics.median(stamped.us))
    work = replace(work, screened=stamped.screened)
    return stamped_phase(modules, each, steps, stamped.us, plain_us or statistics.median(stamped.us), work, track=track)


def stamped_phase(
    modules: Sequence[ModulePath],
    each: Sequence[tuple[float, float, float]],
    steps: int,
    runs: Sequence[float],
    plain_us: float,
    work: Work,
    track: str = "gpu",
) -> Phase:
    """Return a phase of stages, which follow one another without gaps in one kernel; its rows name the stages. `runs`
    are the µs per token of some launches."""
    spans = tuple(SpanRow(path, mean, 0.0) for path, (mean, _, _) in zip(modules, each, strict=True))
    moments, at = [Moment("step", "step 1", (), 0.0, sum(mean for mean, _, _ in each))], 0.0
    for path, (mean, _, _) in zip(modules, each, strict=True):
        moments.append(Moment(track, kernel_name(path), path, at, mean))
        at += mean
    launch = 1 / (steps + 1)
    return Phase(
        name="decode",
        source="stamps",
        steps=steps,
        step_us=statistics.median(runs),
        fastest_us=min(runs),
        slowest_us=max(runs),
        plain_us=plain_us,
        work=work,
        spans=spans,
        kernels=tuple(
            KernelRow(kernel_name(path), path, 1.0, mean, mean)
            for path, (mean, _, _) in zip(modules, each, strict=True)
        ),
        launches=Launches(count=launch, kernels=launch),
        timeline=tuple(moments),
    )
