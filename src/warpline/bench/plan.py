"""How a run that may take only so long divides its time: every case what one method takes, and of the rest an equal
part, except those that need less."""

from __future__ import annotations

from collections.abc import Sequence

from warpline.bench.workloads import Case
from warpline.config import ModelConfig
from warpline.model import cost

#: A method needs about this: a moment to be built, and some generations at a fraction of the machine's speed.
BUILD_SECONDS, GENERATIONS = 2.0, 4.0
#: And at least this, in a hurry.
LEAST_BUILD_SECONDS, LEAST_GENERATIONS = 1.0, 1.8
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


def need(case: Case, at_best: float, startups: Sequence[float]) -> tuple[float, float]:
    """Seconds that a case takes with one method in a hurry, and with all of them without haste; each has its seconds
    before it begins."""
    if not startups:
        return 0.0, 0.0
    if case.kind in ("coldstart", "memory"):
        starts = 2 if case.kind == "coldstart" else 1
        times = [starts * (PROCESS_SECONDS + startup) for startup in startups]
        return times[0], sum(times)
    least = startups[0] + LEAST_BUILD_SECONDS + LEAST_GENERATIONS * at_best
    return least, sum(startup + BUILD_SECONDS + GENERATIONS * at_best for startup in startups)


def share(seconds: float, needs: Sequence[tuple[float, float]]) -> float:
    """What the first case may take of `seconds`, each needing so much at least and at most: all get the least, and of
    what is left as much as any other, unless some need less."""
    left = seconds - sum(least for least, _ in needs)
    first, *_ = (most - least for least, most in needs)
    if left <= 0:
        return needs[0][0]
    for done, wanted in enumerate(sorted(most - least for least, most in needs)):
        equal = left / (len(needs) - done)
        if wanted > equal:
            return needs[0][0] + min(first, equal)
        left -= wanted
    return needs[0][1] + left / len(needs)
