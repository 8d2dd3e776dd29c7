"""How a run with a time limit divides its time: every case gets what one method takes, and an equal part of the rest
unless it needs less."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from warpline.bench.requests import lengths
from warpline.bench.workloads import Case
from warpline.config import ModelConfig
from warpline.model import cost

#: A method needs about this: seconds to be built, and some generations at a fraction of the machine's speed.
BUILD_SECONDS, GENERATIONS = 2.0, 4.0
#: The least that is planned for a method when time is short.
LEAST_BUILD_SECONDS, LEAST_GENERATIONS = 1.0, 1.8
#: Seconds for a new process to import torch and load a model.
PROCESS_SECONDS = 8.0
NO_TIME = {"status": "skipped", "why": "no time for it in this run: --minutes says how long one may take"}


@dataclass(slots=True)
class Deadline:
    """When a case should be done, on the clock of time.monotonic."""

    at: float

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.at - time.monotonic())


def seconds_at_best(
    case: Case, config: ModelConfig, read_gb_s: float, tflop_s: float, *, kv_dtype: str | None = None
) -> float:
    """Return the seconds of one generation of a case if memory and arithmetic were fully used."""

    def best(moved: float, flops: float) -> float:
        return max(moved / read_gb_s / 1e9, flops / tflop_s / 1e12)

    if case.kind == "throughput":
        return best(*_work_of_requests(case, config, kv_dtype))
    prompt = cost.prefill(config, case.dtype, batch=case.batch, tokens=case.prompt, kv_dtype=kv_dtype)
    seconds = best(cost.total_bytes(prompt), cost.total_flops(prompt))
    steps = case.new - 1
    if steps > 0:
        step = cost.decode(config, case.dtype, batch=case.batch, context=case.prompt + case.new // 2)
        rows = [case.prompt] * case.batch
        moved = cost.decode_bytes(config, case.dtype, lengths=rows, steps=steps, screened=True, kv_dtype=kv_dtype)
        seconds += best(moved, steps * cost.total_flops(step))
    return seconds


@functools.lru_cache(maxsize=8)
def _work_of_requests(case: Case, config: ModelConfig, kv_dtype: str | None) -> tuple[int, int]:
    """Return bytes and FLOPs of all requests of a case, whatever the batching: the weights are read at least once, and
    for every token the cache of its own sequence. The arithmetic of attention, a few percent, is left out."""
    asked = lengths(case, config.n_positions)
    rows, ends = sum(prompt + new - 1 for prompt, new in asked), sum(new for _, new in asked)
    passes = ((rows, 1, 0), (ends, 0, 1))  # (rows, through the blocks, through the head)
    one = functools.partial(cost.Workload, config=config, dtype=case.dtype, kv_dtype=kv_dtype)
    work = [one(batch=b, new=n, logits=head) for b, n, head in passes]
    moved = cost.weight_bytes(config, case.dtype)
    for steps in {new - 1 for _, new in asked}:
        prompts = [prompt for prompt, new in asked if new - 1 == steps]
        without = cost.total_bytes(cost.decode(config, case.dtype, batch=len(prompts), kv_dtype=kv_dtype))
        moved += (
            cost.decode_bytes(config, case.dtype, lengths=prompts, steps=steps, kv_dtype=kv_dtype) - steps * without
        )
    return moved, sum(map(cost.total_flops, work))


def need(case: Case, at_best: float, startups: Sequence[float]) -> tuple[float, float]:
    """Return the seconds a case takes with one method at the least, and with all of them without a limit; `startups`
    are the startup seconds of the methods."""
    if not startups:
        return 0.0, 0.0
    if case.kind in ("coldstart", "memory"):
        starts = 2 if case.kind == "coldstart" else 1
        times = [starts * (PROCESS_SECONDS + startup) for startup in startups]
        return times[0], sum(times)
    least = startups[0] + LEAST_BUILD_SECONDS + LEAST_GENERATIONS * at_best
    return least, sum(startup + BUILD_SECONDS + GENERATIONS * at_best for startup in startups)


def share(seconds: float, needs: Sequence[tuple[float, float]]) -> float:
    """Return the part of `seconds` for the first case; `needs` are (least, most) seconds per case. Every case gets its
    least; the rest is divided equally, except where a case needs less."""
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
