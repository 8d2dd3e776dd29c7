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


def batches(asked: Sequence[Asked], size: int, positions: int, *, ragged: bool, fixed: bool) -> Iterator[Batch]:
    """The requests in batches of `size`, in the order in which they come: prompts padded on the left to the longest,
    unless the method takes `ragged` ones, and all run to the longest output. With `fixed`, shapes are few: prompts are
    multiples of `MULTIPLE` long and rows as many as the batch has. What would exceed the model's context is cut off,
    which is to the padded method's advantage."""
    for first in range(0, len(asked), size):
        some = asked[first : first + size]
        longest, new = max(len(one.prompt) for one in some), max(one.new for one in some)
        if fixed:
            longest = min(-(-longest // MULTIPLE) * MULTIPLE, max(longest, positions - new))
        prompts = [one.prompt if ragged else (0,) * (longest - len(one.prompt)) + one.prompt for one in some]
        if fixed:
            prompts += [prompts[-1]] * (size - len(prompts))
        yield Batch(some, prompts, min(new, positions - longest))
