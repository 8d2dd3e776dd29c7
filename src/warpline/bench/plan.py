"""How a run that may take only so long divides its time: every case an equal part, except those that need less."""

from __future__ import annotations

from collections.abc import Sequence

from warpline.bench.workloads import Case
from warpline.config import ModelConfig
from warpline.model import cost

#: A method needs about this: a moment to be built, and some generations at a fraction of the machine's speed.
BUILD_SECONDS, GENERATIONS = 2.0, 4
#: A new process, with torch to import and a model to load.
PROCESS_SECONDS = 8.0


def seconds_at_best(case: Case, config: ModelConfig, read_gb_s: float, tflop_s: float) -> float:
    """One generation of a case, if memory and arithmetic were used fully."""

    def best(moved: float, flops: float) -> float:
        return max(moved / read_gb_s / 1e9, flops / tflop_s / 1e12)

    prompt = cost.prefill(config, case.dtype, batch=case.batch, tokens=case.prompt)
    seconds = best(cost.total_bytes(prompt), cost.total_flops(prompt))
    steps = case.new - 1
    if steps > 0:
        step = cost.decode(config, case.dtype, batch=case.batch, context=case.prompt + case.new // 2)
        moved = cost.decode_bytes(config, case.dtype, lengths=[case.prompt] * case.batch, steps=steps)
        seconds += best(moved, steps * cost.total_flops(step))
    return seconds


def need(case: Case, at_best: float, startups: Sequence[float]) -> float:
    """Seconds that a case takes without haste, with methods that need `startups` before they begin."""
    if case.kind in ("coldstart", "memory"):
        starts = 2 if case.kind == "coldstart" else 1
        return sum(starts * (PROCESS_SECONDS + startup) for startup in startups)
    return sum(startup + BUILD_SECONDS + GENERATIONS * at_best for startup in startups)


def share(seconds: float, needs: Sequence[float]) -> float:
    """What the first of `needs` may take of `seconds`: as much as any other, unless some need less."""
    left = seconds
    for done, wanted in enumerate(sorted(needs)):
        equal = left / (len(needs) - done)
        if wanted > equal:
            return min(needs[0], equal)
        left -= wanted
    return needs[0] + left / len(needs)
