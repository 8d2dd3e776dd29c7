"""Teaching ladders: the gain of each optimisation, from naive to production. The engine does not import them."""

from __future__ import annotations

from warpline.errors import one_of
from warpline.kernels.ladder.attention import ATTENTION
from warpline.kernels.ladder.gelu import GELU
from warpline.kernels.ladder.matmul import MATMUL
from warpline.kernels.ladder.rows import LAYERNORM, SOFTMAX
from warpline.kernels.ladder.rung import Ladder

LADDERS: dict[str, Ladder] = {ladder.name: ladder for ladder in (MATMUL, LAYERNORM, SOFTMAX, GELU, ATTENTION)}


def find_ladder(name: str) -> Ladder:
    """Return the ladder called `name`; the error for an unknown name suggests the nearest."""
    return LADDERS[one_of(name, LADDERS, "ladder")]
