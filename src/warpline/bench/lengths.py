"""Lengths of requests as they are in real use: most are short, some ten times as long. Knows no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

#: Tokens that a prompt and an output have at least.
LEAST = 4
#: Spread of the lengths' logarithms.
SPREAD = 0.8


def drawn(
    draw: random.Random, count: int, prompt: int, new: int, most: int, spread: float = SPREAD
) -> Iterator[tuple[int, int]]:
    """Tokens of `count` prompts and of their outputs, about so many in the mean, together at most `most`."""

    def length(mean: int) -> int:
        return max(LEAST, round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    for _ in range(count):
        begun = min(length(prompt), most - LEAST)
        yield begun, min(length(new), most - begun)
