"""Many requests of different lengths at once: how long until all are answered, and how full the steps were meanwhile.

A method with slots takes them all in one call. Others answer them in padded batches, longest outputs first: a batch is
as long as its longest prompt and goes on to its longest output. Several sizes are tried and the best one is kept;
shapes are compiled before anything is timed. Only wanted tokens count.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpline.bench import budget
from warpline.bench import methods as known
from warpline.bench.budget import NO_TIME, Deadline
from warpline.bench.methods.base import Counts, Method
from warpline.bench.oracle import Oracle, Verdict
from warpline.bench.protocol import Sample, collect, interleave
from warpline.bench.requests import Asked, batches, by_output, requests
from warpline.bench.rows import FAILURES, failed
from warpline.bench.workloads import Case, Settings
from warpline.config import ModelConfig
from warpline.model.weights import Weights

logger = logging.getLogger(__name__)

#: Sizes of padded batches by device. The context closes batches early, so the smallest size goes first: it is usually
#: the best. A larger one is given up once its projected time exceeds the best by the factor HOPELESS.
SIZES = {"cuda": (32, 64, 256), "cpu": (8, 32)}
HOPELESS = 1.2
#: Requests whose tokens are judged, and the most repetitions that are timed.
JUDGED, REPETITIONS = 8, 3
#: Tokens of a generation that only makes a method compile a shape.
WARM_TOKENS = 2

Row = dict[str, Any]


@dataclass(slots=True)
class Served:
    """A method that has answered all requests once."""

    method: Method
    asked: Sequence[Asked]  # in the order in which the method answers them
    size: int  # of its batches
    tokens: list[list[int]]
    seconds: float


def measure(
    case: Case,
    weights: Weights,
    device: torch.device,
    rows: dict[str, Row],
    settings: Settings,
    deadline: Deadline,
    limits: dict[str, float],
    tick: Callable[[float], None],
) -> None:
    """Fill in the rows of the methods that can do this: each is judged first, then they are timed in turn."""
    config = case.windowed(weights.config)
    asked, oracle = requests(case, config), Oracle(replace(weights, config=config))
    served: dict[str, Served] = {}
    for name, row in rows.items():
        found = _build(name, row, case, weights, device, asked, oracle, settings, deadline, first=not served)
        if found is not None:
            served[name] = found
        tick(0.5 if found is not None else 1)
    del oracle
    before = {name: one.method.counts() for name, one in served.items()}
    samples = _time(served, device, settings, deadline)
    for name, one in served.items():
        began = before[name] if name in samples else None  # else count from the engine's start, for the judged run
        rows[name] |= figures(case, config, name, samples.get(name, Sample((one.seconds,))), limits)
        rows[name] |= _engine(began, one.method.counts())
        if one.method.serves == "padded":
            rows[name]["padded_batch"] = one.size
        one.method.close()
        tick(0.5)


def _build(
    name: str,
    row: Row,
    case: Case,
    weights: Weights,
    device: torch.device,
    asked: Sequence[Asked],
    oracle: Oracle,
    settings: Settings,
    deadline: Deadline,
    *,
    first: bool,
) -> Served | None:
    """Return the method at its best batch size, if its tokens are right; on failure the row says why. Only the first
    method may exceed the deadline."""
    kind = known.find(name)
    left = math.inf if first else deadline.left
    if kind.startup_seconds > left:
        row |= NO_TIME
        return None
    try:
        served = best(kind, weights, case, device, asked, min(settings.patience_seconds, left))
        if served is None:
            row |= {"status": "skipped", "why": settings.impatience} if left > settings.patience_seconds else NO_TIME
            return None
        verdict = judge(served, oracle, case.dtype)
    except FAILURES as error:
        logger.debug("%s failed", name, exc_info=True)
        row |= failed(error)
        return None
    row |= {"agreeing": round(verdict.agreeing, 4), "deficit": round(verdict.worst, 6)}
    if verdict.right or not kind.exact:
        row["status"] = "ok"
        return served
    row |= {"status": "wrong", "why": f"its tokens are {verdict.worst:.2g} σ from the likeliest"}
    served.method.close()
    return None


def best(
    kind: type[Method], weights: Weights, case: Case, device: torch.device, asked: Sequence[Asked], seconds: float
) -> Served | None:
    """Return the method with the batch size that answers in the least time, or None if none finishes within `seconds`.
    Sizes that do not fit in memory are left out; raise if none fits."""
    if kind.serves == "together":
        sizes: tuple[int, ...] = (len(asked),)
    else:
        asked = by_output(asked)
        sizes = tuple(dict.fromkeys(min(size, len(asked)) for size in SIZES[device.type]))
    found: Served | None = None
    shortage: torch.OutOfMemoryError | None = None
    for size in sizes:
        try:
            one = _tried(kind, weights, case, device, asked, size, seconds if found is None else found.seconds)
        except torch.OutOfMemoryError as error:
            shortage = error.with_traceback(None)  # the traceback holds what was allocated
            gc.collect()
            torch.cuda.empty_cache()
            continue
        if one is not None:
            if found is not None:
                found.method.close()
            found = one
    if found is None and shortage is not None:
        raise shortage
    return found


def _tried(
    kind: type[Method],
    weights: Weights,
    case: Case,
    device: torch.device,
    asked: Sequence[Asked],
    size: int,
    seconds: float,
) -> Served | None:
    """Warm up, then answer all requests; give up between two batches when the projected time exceeds `seconds`."""
    together = kind.serves == "together"
    with ExitStack() as stack:
        method = kind(weights, case if together else sized(case, weights.config, kind, asked, size), device)
        stack.callback(method.close)
        steps = [len(asked)] if together else [one.new for one in method.batches(asked, size)]
        if not together:
            _warm_up(method, asked, size)
        begun, taken = time.perf_counter(), 0.0
        tokens: list[list[int]] = []
        for done, some in enumerate(method.serve(asked, size), 1):
            tokens += some
            taken = time.perf_counter() - begun
            if taken * sum(steps) / sum(steps[:done]) > seconds * (HOPELESS if done < len(steps) else 1):
                return None
        missing = sum(one.new for one in asked) - sum(map(len, tokens))
        if missing:
            raise RuntimeError(f"{missing} of the tokens that were asked for did not come")
        stack.pop_all()
        return Served(method, asked, size, tokens, taken)


def sized(case: Case, config: ModelConfig, kind: type[Method], asked: Sequence[Asked], size: int) -> Case:
    """Return the case with the shape of its padded batches: the longest prompt and the longest text of any batch."""
    made = batches(asked, size, config.n_positions, ragged=kind.ragged, fixed=kind.fixed)
    shapes = [(max(map(len, one.prompts)), one.new) for one in made]
    prompt, whole = max(prompt for prompt, _ in shapes), max(map(sum, shapes))
    return replace(case, batch=size, prompt=prompt, new=max(whole - prompt, max(new for _, new in shapes)))


def _warm_up(method: Method, asked: Sequence[Asked], size: int) -> None:
    """Generate a few tokens for every shape if the method needs fixed shapes, else for one batch."""
    shapes = {max(map(len, one.prompts)): one for one in method.batches(asked, size)}
    for one in itertools.islice(shapes.values(), None if method.fixed else 1):
        method.complete(one, min(WARM_TOKENS, one.new))


def judge(served: Served, oracle: Oracle, dtype: str) -> Verdict:
    """Return the verdict on a sample of all requests; padded ones are judged with the prompts the method was given."""
    method, asked = served.method, served.asked
    prompts: list[Sequence[int]] = [one.prompt for one in asked]
    if method.serves == "padded":
        some = method.batches(asked, served.size)
        prompts = [prompt for batch in some for prompt, _ in zip(batch.prompts, batch.asked, strict=False)]
    count = min(JUDGED, len(asked))
    chosen = {min(len(asked) - 1, i * len(asked) // count + i) for i in range(count)}

    def row(ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], device=method.device)

    verdicts = [oracle.judge(row(prompts[i]), row(served.tokens[i]), dtype) for i in sorted(chosen)]
    agreeing = sum(verdict.agreeing for verdict in verdicts) / len(verdicts)
    return Verdict(agreeing, max(verdict.worst for verdict in verdicts), verdicts[0].allowed)


def _time(served: dict[str, Served], device: torch.device, settings: Settings, deadline: Deadline) -> dict[str, Sample]:
    """Time the methods in turn. The judged run counts instead when time is short, or for a padded method, already warm
    then, if one more run would take its whole part of the budget."""
    left = deadline.left
    if left < sum(one.seconds for one in served.values()):
        return {}
    part = settings.budget_seconds / max(1, len(served))
    calls: dict[str, Callable[[], object]] = {
        name: (lambda one=one: list(one.method.serve(one.asked, one.size)))  # type: ignore[misc]
        for name, one in served.items()
        if one.method.serves == "together" or one.seconds < part
    }
    return collect(
        interleave(
            calls,
            device,
            repetitions=min(REPETITIONS, settings.repetitions),
            budget_seconds=min(settings.budget_seconds, left),
            least=1,
        )
    )


def figures(case: Case, config: ModelConfig, name: str, sample: Sample, limits: dict[str, float]) -> Row:
    """Return the figures of a row, from the time that all requests took."""
    kind = known.find(name)
    case = replace(case, dtype=kind.stored or case.dtype)
    wanted = sum(one.new for one in requests(case, config))
    row: Row = sample.figures() | {
        "requests_per_second": round(case.batch / sample.median, 3),
        "tokens_per_second": round(wanted / sample.median, 2),
    }
    if kind.exact or kind.stored or kind.kv_stored:  # others move fewer bytes than the dtype says
        best = budget.seconds_at_best(case, config, *limits.values(), kv_dtype=kind.kv_stored)
        row["percent_of_limit"] = round(100 * best / sample.median, 2)
    return row


def _engine(before: Counts | None, after: Counts | None) -> Row:
    """Return the mean number of sequences per step, and the share of time in which the device was idle."""
    if after is None:
        return {}
    before = before or Counts(0, 0, 0.0, 0.0)
    steps, idle = after.steps - before.steps, after.idle_seconds - before.idle_seconds
    busy = after.busy_seconds - before.busy_seconds
    return {
        "mean_lanes": round((after.lane_steps - before.lane_steps) / max(1, steps), 2),
        "idle_share": round(idle / max(1e-9, idle + busy), 4),
    }
