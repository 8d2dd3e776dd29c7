"""Clocks inside code that decodes many tokens in one launch or call, where stages cannot be seen from outside: the
blocks of the persistent kernel and the threads of the cpu executor record one after every stage of every layer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from warpline.profile.names import stamp_path
from warpline.profile.session import KernelRow, Launches, ModulePath, Moment, Phase, SpanRow, Work

if TYPE_CHECKING:
    from warpline.bench.methods.base import Stamped, StampedPrompts

ENTRY = "warpline_decode"
#: Launches that are timed.
RUNS = 5


def kernel_name(path: ModulePath) -> str:
    """Return the name of a stage in the table of kernels."""
    return f"{ENTRY}: {path[-1]}"


def stage_times(clocks: Sequence[Sequence[int]], count: int, token_us: float) -> list[float]:
    """Return µs of each of `count` stages, the mean of all blocks. Each block's clocks hold several tokens one after
    the other; the first one only begins the measurement. A clock is compared only with itself; cycles become µs because
    the mean token is known to take `token_us`."""
    tokens = len(clocks[0]) // count
    if tokens < 2:
        raise ValueError("stamps of two tokens are needed: the first one's begin is not stamped")
    cycles = [0.0] * count
    for values in clocks:
        for i in range(count, tokens * count):
            cycles[i % count] += values[i] - values[i - 1]
    return [token_us * stage / sum(cycles) for stage in cycles]


def decode_phase(stamped: Stamped, steps: int, plain_us: float | None, work: Work, *, track: str = "gpu") -> Phase:
    """Return the phase that the clocks show, in the time of the launches; `plain_us` is that of an unrecorded step."""
    modules, clocks = [stamp_path(*moment) for moment in stamped.moments], stamped.clocks.tolist()
    each = stage_times(clocks, len(modules), statistics.median(stamped.us))
    means = dict(zip(modules, each, strict=True))
    work = replace(work, screened=stamped.screened)
    plain_us = plain_us or statistics.median(stamped.us)
    return stamped_phase("decode", means, 1 / (steps + 1), steps, stamped.us, plain_us, work, track=track)


def prefill_phase(stamped: StampedPrompts, plain_us: float | None, work: Work) -> Phase:
    """Return the phase of passes over prompts; time outside of the calls is Python's. A long prompt goes through the
    layers in parts; their times are added up."""
    means: dict[ModulePath, float] = {}
    for clocks, moments in stamped.calls:
        for moment, us in zip(moments, (clocks.diff(dim=1).double().mean(dim=0) / 1e3).tolist(), strict=True):
            path = stamp_path(*moment, apart=True)
            means[path] = means.get(path, 0.0) + us
    calls, runs, plain_us = len(stamped.calls), stamped.us, plain_us or statistics.median(stamped.us)
    work = replace(work, screened=stamped.screened)
    return stamped_phase("prefill", means, calls, len(runs), runs, plain_us, work, track="host")


def stamped_phase(
    name: str,
    means: Mapping[ModulePath, float],
    launches: float,
    steps: int,
    runs: Sequence[float],
    plain_us: float,
    work: Work,
    track: str = "gpu",
) -> Phase:
    """A phase of stages, `means` µs each: they follow one another in `launches` of a step, whose rows say which stage
    they are. What is missing of the median of `runs`, µs of a step, is between the launches."""
    between = statistics.median(runs) - sum(means.values()) if launches >= 1 else 0.0
    spans = [SpanRow(path, mean, 0.0) for path, mean in means.items()]
    if between > 0:
        spans.append(SpanRow((), 0.0, between))
    moments, at = [Moment("step", "step 1", (), 0.0, sum(means.values()))], 0.0
    for path, mean in means.items():
        moments.append(Moment(track, kernel_name(path), path, at, mean))
        at += mean
    return Phase(
        name=name,
        source="stamps",
        steps=steps,
        step_us=statistics.median(runs),
        fastest_us=min(runs),
        slowest_us=max(runs),
        plain_us=plain_us,
        work=work,
        spans=tuple(spans),
        kernels=tuple(KernelRow(kernel_name(path), path, 1.0, mean, mean) for path, mean in means.items()),
        launches=Launches(count=launches, kernels=launches),
        timeline=tuple(moments),
    )
