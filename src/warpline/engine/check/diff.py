"""Compares two executors: the first value, in the order of computation, that differs by more than rounding. Or one
executor, alone and in a batch: the first value that differs in a bit.

Both sides decode the same text token by token. Every token is given, so a difference does not lead to other tokens.
After each step all values that the executors can show are compared: `Executor.observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warpline.config import KV_DTYPES, ROUNDING, SamplingParams
from warpline.engine.executors.base import Executor
from warpline.engine.executors.graph.schedule import order
from warpline.engine.request import Request, Span
from warpline.engine.slots import Slots

#: Roundings per layer, which add up like a random walk, relative to a row's largest value; and the factor of tolerance.
_PER_LAYER, _SLACK = 8, 6.0
#: With a KV cache of codes, a value between two codes becomes either of them, up to 2^-7 of a row's largest. From the
#: first layer on this allows for twice as much.
_CODES = 2**-10


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two executors: the largest error there, and what rounding may cause."""

    position: int
    row: int
    name: str
    error: float
    allowed: float
    size: float  # the largest value in the row

    def __str__(self) -> str:
        return (
            f"first difference at position {self.position}, row {self.row}: {self.name} is off by {self.error:.3g} "
            f"where rounding explains {self.allowed:.3g} (its largest value is {self.size:.3g})"
        )


@dataclass(frozen=True, slots=True)
class Dependence:
    """The first difference between a sequence in a batch of `batch` sequences and the same one alone."""

    batch: int
    position: int
    row: int
    name: str
    error: float  # the largest error

    def __str__(self) -> str:
        return (
            f"bits depend on the batch: at position {self.position} {self.name} of row {self.row} among {self.batch} "
            f"is not what it is alone, by {self.error:.3g} at most"
        )


def compare(
    first: Executor,
    second: Executor,
    texts: Sequence[Sequence[int]],
    steps: int,
    tick: Callable[[], None] = lambda: None,
) -> Difference | None:
    """Decode the last `steps` tokens of each text with both executors, and return the first difference; `second` counts
    as right."""
    sides = [(executor, *_begin(executor, texts, steps)) for executor in (first, second)]
    names = order(first.config.n_layer)
    unit = max(ROUNDING[KV_DTYPES[first.dtype]], _CODES if first.kv_dtype or second.kv_dtype else 0)
    for step in range(steps):
        found, expected = (executor.observe(slots, lanes) for executor, slots, lanes in sides)
        for name in names:
            if name in found and name in expected:
                layer = int(name.split(".")[1]) if name.startswith("h.") else first.config.n_layer
                row = _worst(found[name], expected[name], layer, unit)
                if row is not None:
                    return Difference(len(texts[row[0]]) - steps + step, row[0], name, *row[1:])
        tick()
    return None


def first_dependence(
    executor: Executor, texts: Sequence[Sequence[int]], steps: int, tick: Callable[[], None] = lambda: None
) -> Dependence | None:
    """Decode the last `steps` tokens of all texts together and of each alone; return the first difference."""
    together, *alone = [_begin(executor, some, steps) for some in (texts, *([text] for text in texts))]
    for step in range(steps):
        found = {name: values.clone() for name, values in executor.observe(*together).items()}
        rows = [executor.observe(*one) for one in alone]
        for name in order(executor.config.n_layer):
            for row, its in enumerate(rows):
                if name in found and not torch.equal(found[name][row], its[name][0]):
                    error = float((found[name][row].double() - its[name][0].double()).abs().max())
                    return Dependence(len(texts), len(texts[row]) - steps + step, row, name, error)
        tick()
    return None


def _begin(executor: Executor, texts: Sequence[Sequence[int]], steps: int) -> tuple[Slots, list[int]]:
    """Return slots with the texts, all but the last `steps` tokens in the cache, and their lanes."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    requests = [
        Request(text[:-steps], params, 0, i, len(text) + 1, forced=text[-steps:]) for i, text in enumerate(texts)
    ]
    slots = executor.allocate(len(texts), max(request.limit for request in requests))
    lanes = slots.admit(requests)
    prompts = zip(lanes, requests, strict=True)
    executor.prefill(slots, [Span(slot, 0, len(request.prompt), (slot,)) for slot, request in prompts])
    return slots, lanes


def _worst(found: Tensor, expected: Tensor, layer: int, unit: float) -> tuple[int, float, float, float] | None:
    """Return the row furthest beyond what rounding allows at the layer, with error, allowed error and size; or None."""
    error = (found.double() - expected.double()).abs().nan_to_num(torch.inf).flatten(1).amax(dim=1)
    size = expected.double().abs().flatten(1).amax(dim=1)
    allowed = _SLACK * unit * (_PER_LAYER * (layer + 1)) ** 0.5 * size
    row = int((error / allowed.clamp(min=1e-30)).argmax())
    return (row, float(error[row]), float(allowed[row]), float(size[row])) if error[row] > allowed[row] else None
