"""x matrix^T with a matrix stored row by row: the LM head in floating point. Its rows are also the tokens' embeddings,
and single logits of it are computed (screen.py).

Every sum has the order of `vectors.products`, so a row's bits do not depend on other rows. With few rows, reading the
matrix takes the time, and it is read as stored. With many rows arithmetic does: elements are converted once for all
rows, and a block of six rows and two outputs loads 8 vectors for 12 products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from warpline.kernels.cpu.intrinsics import INNER, Number, array, load
from warpline.kernels.cpu.sizes import ROOM, SUMS
from warpline.kernels.cpu.vectors import products

#: Most rows of x for which the matrix is read as it is stored.
FEW = 8
#: Outputs of one row of x whose last sums are made together; the matrix is read row by row all the same.
_TOGETHER = 4
#: Rows and outputs of a block with many rows.
_TALL, _WIDE = 6, 2
_BLOCK = products(_TALL, _WIDE)


@njit(**INNER)
def _finish(
    sums: int, r: int, rows: int, output: int, outputs: int, bias: np.ndarray, y: np.ndarray,
    adds: bool,
) -> None:  # fmt: skip
    found = array(sums, np.float32, SUMS)
    for o in range(outputs):
        base = bias[output + o] if len(bias) > 0 else np.float32(0)
        for i in range(rows):
            value = found[i * outputs + o] + base
            y[r + i, output + o] = y[r + i, output + o] + value if adds else value


@functools.cache
def _few_of(kind: Any) -> Callable[..., None]:
    """Return a function that computes one output for the rows of x from `first` on."""
    one, two, three, four = (products(rows, 1) for rows in (1, 2, 3, 4))

    @njit(**INNER)
    def few(
        at: int, x: int, rows: int, inputs: int, output: int, bias: np.ndarray, y: np.ndarray,
        first: int, adds: bool, sums: int,
    ) -> None:  # fmt: skip
        r = first
        while r < rows:
            here, some = x + 4 * r * inputs, min(rows - r, 4)
            if some == 1:
                one(at, kind, here, inputs, sums, 1)
            elif some == 2:
                two(at, kind, here, inputs, sums, 1)
            elif some == 3:
                three(at, kind, here, inputs, sums, 1)
            else:
                four(at, kind, here, inputs, sums, 1)
            _finish(sums, r, some, output, 1, bias, y, adds)
            r += some

    return few


_near = _few_of(np.float32)


@njit(**INNER)
def _many(
    at: int, x: int, rows: int, inputs: int, output: int, outputs: int, bias: np.ndarray,
    y: np.ndarray, adds: bool, sums: int,
) -> None:  # fmt: skip
    """Compute several outputs of a matrix in float32."""
    tall, wide = rows - rows % _TALL, outputs - outputs % _WIDE
    for r in range(0, tall, _TALL):
        for o in range(0, wide, _WIDE):
            _BLOCK(at + 4 * o * inputs, np.float32, x + 4 * r * inputs, inputs, sums, _WIDE)
            _finish(sums, r, _TALL, output + o, _WIDE, bias, y, adds)
    for o in range(outputs):
        _near(at + 4 * o * inputs, x, rows, inputs, output + o, bias, y, tall if o < wide else 0, adds, sums)


@functools.cache
def multiply_of(kind: Any) -> Callable[..., None]:
    """Return the product with a matrix of numpy's type `kind`: outputs `first` to `last` for every row of x, plus bias
    if given, stored in y or added to it. Matrix and x are given by address; `room` is the address of memory for `ROOM`
    rows of the matrix and `SUMS` floats."""
    size, is_plain, few = np.dtype(kind).itemsize, kind is np.float32, _few_of(kind)
    several = products(1, _TOGETHER, in_turn=True)

    @njit(**INNER)
    def multiply(
        weights: int, bias: np.ndarray, x: int, rows: int, inputs: int, y: np.ndarray, first: int,
        last: int, adds: bool, room: int,
    ) -> None:  # fmt: skip
        sums = room + 4 * ROOM * inputs
        if rows <= FEW:
            if rows == 1:
                begin, first = first, last - (last - first) % _TOGETHER
                for output in range(begin, first, _TOGETHER):
                    several(weights + output * inputs * size, kind, x, inputs, sums, _TOGETHER)
                    _finish(sums, 0, 1, output, _TOGETHER, bias, y, adds)
            for output in range(first, last):
                few(weights + output * inputs * size, x, rows, inputs, output, bias, y, 0, adds, sums)
            return
        for output in range(first, last, ROOM):
            outputs, at = min(last - output, ROOM), weights + output * inputs * size
            if not is_plain:
                stored, converted = array(at, kind, outputs * inputs), array(room, np.float32, outputs * inputs)
                for i in range(outputs * inputs):
                    converted[i] = load(stored[i])
                at = room
            _many(at, x, rows, inputs, output, outputs, bias, y, adds, sums)

    return multiply


@functools.cache
def product_of(kind: Any) -> Callable[..., Number]:
    """Return a function with the bits of `multiply` for one output and one row of x, without bias."""
    one, size = products(1, 1), np.dtype(kind).itemsize

    @njit(**INNER)
    def product(weights: int, x: int, inputs: int, output: int, room: int) -> Number:
        return one(weights + output * inputs * size, kind, x, inputs, room, 1)

    return product
