"""Requests of different lengths that arrive all at once, and padded batches of them for methods without slots."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpline.bench.lengths import drawn
from warpline.bench.workloads import Case
from warpline.config import ModelConfig

#: Most tokens of a prompt and its output together.
MOST = 1024
#: Methods that want few shapes get prompts with a multiple of this length.
MULTIPLE = 64


class Asked(NamedTuple):
    """One request: a prompt, and how many tokens are wanted after it."""

    prompt: tuple[int, ...]
    new: int


@functools.lru_cache(maxsize=8)
def lengths(case: Case, positions: int) -> tuple[tuple[int, int], ...]:
    """Return prompt and output tokens of each request, with the case's means; the same every time."""
    draw = random.Random(f"{case.batch} {case.prompt} {case.new}")
    return tuple(drawn(draw, case.batch, case.prompt, case.new, min(MOST, positions)))


def requests(case: Case, config: ModelConfig) -> list[Asked]:
    """Return the case's requests, in the order in which they arrive."""
    draw = np.random.default_rng(case.batch)
    return [
        Asked(tuple(draw.integers(config.vocab_size, size=prompt).tolist()), new)
        for prompt, new in lengths(case, config.n_positions)
    ]


class Batch(NamedTuple):
    """Requests that a method answers together: they begin and end at the same time."""

    asked: Sequence[Asked]
    prompts: Sequence[Sequence[int]]  # as the method gets them, perhaps padded
    new: int

    @property
    def rectangle(self) -> Tensor:
        """The prompts as a matrix; they must have one length."""
        return torch.tensor(self.prompts)


def by_output(asked: Sequence[Asked]) -> list[Asked]:
    """Return the requests with the longest outputs first. This is best for padded batches: a batch runs to its longest
    output, and the number of tokens of a request is known before it begins."""
    return sorted(asked, key=lambda one: -one.new)


def batches(asked: Sequence[Asked], size: int, positions: int, *, ragged: bool, fixed: bool) -> Iterator[Batch]:
    """Yield the requests in batches of up to `size`, in order: prompts padded on the left to the longest, unless the
    method takes `ragged` ones, and all run to the longest output. A batch is closed early where both together would
    exceed the model's context: every request gets all of its tokens. With `fixed`, there are few shapes: prompt lengths
    are multiples of `MULTIPLE` where there is room, and every batch has `size` rows."""
    for some in _closed(asked, size, positions):
        longest, new = max(len(one.prompt) for one in some), max(one.new for one in some)
        if fixed:
            longest = min(-(-longest // MULTIPLE) * MULTIPLE, positions - new)
        prompts = [one.prompt if ragged else (0,) * (longest - len(one.prompt)) + one.prompt for one in some]
        if fixed:
            prompts += [prompts[-1]] * (size - len(prompts))
        yield Batch(some, prompts, new)


def _closed(asked: Sequence[Asked], size: int, positions: int) -> Iterator[list[Asked]]:
    some: list[Asked] = []
    longest = new = 0
    for one in asked:
        longest, new = max(longest, len(one.prompt)), max(new, one.new)
        if some and (len(some) == size or longest + new > positions):
            yield some
            some, longest, new = [], len(one.prompt), one.new
        some.append(one)
    if some:
        yield some
