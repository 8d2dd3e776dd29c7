"""Lengths of requests as in real use: most are short, some are ten times as long. Needs no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

#: Fewest tokens of a prompt and of an output.
LEAST = 4
#: Standard deviation of the logarithms of the lengths.
SPREAD = 0.8


def drawn(
    draw: random.Random, count: int, prompt: int, new: int, most: int, spread: float = SPREAD
) -> Iterator[tuple[int, int]]:
    """Yield tokens of `count` prompts and of their outputs: means about `prompt` and `new`, sums at most `most`."""

    def length(mean: int) -> int:
        return max(LEAST, round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    for _ in range(count):
        begun = min(length(prompt), most - LEAST)
        yield begun, min(length(new), most - begun)
