"""Computes the logits that decide the next token, after codes of the LM head have bounded all of them (screen.py).

Greedy decoding needs the logits that can be the largest, and a draw those that can be with noise. With top-p, bounds of
all logits nearly always decide whether the drawn token is kept; otherwise the logits that may be above it are computed
as well, and all of them if that does not decide either. The token is that of a full pass, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from warpline.kernels.cpu.arithmetic import normalise
from warpline.kernels.cpu.intrinsics import INNER, array, matrix
from warpline.kernels.cpu.lanes import FLAG, FLOAT32, banned_and_key, float_at
from warpline.kernels.cpu.products import product_of
from warpline.kernels.cpu.screen import (
    KNOWN,
    WANTED,
    drawn_above,
    is_beyond,
    is_within,
    length_of,
    mark_above,
    mark_drawn,
    mark_possible,
    rest_of,
)  # fmt: skip
from warpline.kernels.cpu.words import Stage, Word


def rescore_of(kind: Any) -> Callable[..., int]:
    """Return the function for a head of numpy's type `kind`."""
    product = product_of(kind)

    @njit(**INNER)
    def compute(head: int, logits: np.ndarray, marks: np.ndarray, x: int, width: int, banned: int) -> None:
        """Compute the logits that are marked as wanted, of the row at an address."""
        for i in range(len(marks)):
            if marks[i] == WANTED:
                if i != banned:
                    logits[i] = product(head, x, width, i, x + 4 * width)
                marks[i] = KNOWN

    @njit(**INNER)
    def rescore(at: np.ndarray, stage: np.ndarray, r: int, slot: int, private: int) -> int:
        """Compute the logits of a row that decide the next token. Return that token, or -1 if it follows from the
        logits that are known now, or from all of them."""
        rows, width, vocab = at[Word.ROWS.value], at[Word.WIDTH.value], at[Word.VOCAB.value]
        x, normal = matrix(at[Word.X.value], FLOAT32, rows, width), array(private, FLOAT32, width)
        weight, bias = (
            array(stage[Stage.NORM.value], FLOAT32, width),
            array(stage[Stage.NORM_BIAS.value], FLOAT32, width),
        )
        normalise(x[r], weight, bias, float_at(at[Word.SETTINGS.value], 0), normal)
        logits = matrix(at[Word.LOGITS.value], FLOAT32, rows, vocab)[r]
        noisy = matrix(at[Word.NOISY.value], FLOAT32, rows, vocab)[r]
        marks = matrix(at[Word.MARKS.value], FLAG, rows, vocab)[r]
        errors, norms = (
            array(stage[Stage.ERRORS.value], FLOAT32, vocab),
            array(stage[Stage.NORMS.value], FLOAT32, vocab),
        )
        head, (banned, key) = stage[Stage.MATRIX.value], banned_and_key(at, slot)
        temperature, top_p = float_at(at[Word.TEMPERATURE.value], slot), float_at(at[Word.TOP_P.value], slot)
        length = length_of(normal)
        rest = rest_of(normal, length)
        if banned >= 0:
            logits[banned] = np.float32(-np.inf)  # it excludes no other token, and is not drawn
        if temperature > 0:
            mark_drawn(logits, errors, norms, length, rest, marks, temperature, key, noisy)
        else:
            mark_possible(logits, errors, norms, length, rest, marks)
        compute(head, logits, marks, private, width, banned)
        drawn = -1
        if temperature > 0 and top_p < 1:
            scale = np.float32(1) / temperature
            drawn = drawn_above(logits, noisy, marks, scale, np.float32(-np.inf))
            if drawn >= 0 and not is_within(logits, errors, norms, length, rest, marks, scale, drawn, top_p):
                mark_above(logits, errors, norms, length, rest, marks, drawn)
                compute(head, logits, marks, private, width, banned)
                while drawn >= 0 and not is_within(logits, errors, norms, length, rest, marks, scale, drawn, top_p):
                    if is_beyond(logits, errors, norms, length, rest, marks, scale, drawn, top_p):
                        drawn = drawn_above(logits, noisy, marks, scale, logits[drawn] * scale)
                    else:
                        drawn = -1
            if drawn < 0:
                for i in range(vocab):
                    marks[i] = KNOWN if marks[i] == KNOWN else WANTED
                compute(head, logits, marks, private, width, banned)
        if banned >= 0:  # the end of the step checks that all logits are finite
            logits[banned] = product(head, private, width, banned, private + 4 * width)
        for i in range(vocab):
            marks[i] = 0
        return drawn

    return rescore
