"""Requests of different lengths that come all at once, and the rectangles that methods without slots make of them."""

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

#: Tokens that a prompt and an output have at most together.
MOST = 1024
#: Prompts of methods that want few shapes are of a length that is a multiple of this.
MULTIPLE = 64


class Asked(NamedTuple):
    """One request: a prompt, and how many tokens are wanted behind it."""

    prompt: tuple[int, ...]
    new: int


@functools.lru_cache(maxsize=8)
def lengths(case: Case, positions: int) -> tuple[tuple[int, int], ...]:
    """Prompt and output of each of the case's requests, about as long in the mean as it says; the same every time."""
    draw = random.Random(f"{case.batch} {case.prompt} {case.new}")
    return tuple(drawn(draw, case.batch, case.prompt, case.new, min(MOST, positions)))


def requests(case: Case, config: ModelConfig) -> list[Asked]:
    """The case's requests, in the order in which they come."""
    draw = np.random.default_rng(case.batch)
    return [
        Asked(tuple(draw.integers(config.vocab_size, size=prompt).tolist()), new)
        for prompt, new in lengths(case, config.n_positions)
    ]


class Batch(NamedTuple):
    """Requests that are answered together by a method that begins and ends them at the same time."""

    asked: Sequence[Asked]
    prompts: Sequence[Sequence[int]]  # as the method gets them
    new: int

    @property
    def rectangle(self) -> Tensor:
        """The prompts as a matrix, where they are of one length."""
        return torch.tensor(self.prompts)


def by_output(asked: Sequence[Asked]) -> list[Asked]:
    """The longest outputs first, which is best for those who pad: a batch runs to its longest, and how many tokens a
    request may get is known before it begins."""
    return sorted(asked, key=lambda one: -one.new)


def batches(asked: Sequence[Asked], size: int, positions: int, *, ragged: bool, fixed: bool) -> Iterator[Batch]:
    """The requests in batches of up to `size`, in their order: prompts padded on the left to the longest, unless the
    method takes `ragged` ones, and all run to the longest output. A batch is closed early where both together would
    exceed the model's context: every request gets all of its tokens. With `fixed`, shapes are few: prompts are
    multiples of `MULTIPLE` long where there is room, and rows as many as the batch has."""
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
