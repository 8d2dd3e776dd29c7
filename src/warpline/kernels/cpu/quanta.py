"""Rows of x as integers, for products with int8 codes: sums of integers, which no order changes.

A row becomes quanta of 16 bits. With all of them for the largest element, rounding loses less than storing x in bf16
would, and about what fp16 does. CPUs multiply pairs of 16-bit numbers in one instruction; bytes, in two instructions
for both halves of x, were as fast with vectors of 64 bytes and slower with narrower ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from warpline.kernels.cpu.intrinsics import INNER, Number, array, as_bits, as_float, floor
from warpline.kernels.cpu.sizes import BEHIND_ROW, row_bytes

MOST = 2**15 - 1
_INFINITE = np.int32(0x7F800000)


@njit(**INNER)
def quantum_of(x: np.ndarray) -> Number:
    """What a quantum of a row is; 0 if the row is as good as zero, infinite if it is not finite."""
    largest = np.int32(0)
    for i in range(len(x)):
        largest = max(largest, np.int32(as_bits(x[i]) & np.int32(0x7FFFFFFF)))
    if largest >= _INFINITE:
        return np.float32(np.inf)
    if as_float(largest) < np.float32(1e-30):
        return np.float32(0)
    return as_float(largest) / np.float32(MOST)


_row_bytes = njit(**INNER)(row_bytes)


@njit(**INNER)
def rounded(x: np.ndarray, at: int) -> None:
    """A row of x becomes quanta at an address, with zeros up to the end of its last line and the quantum behind it."""
    count, quantum, per_one = len(x), quantum_of(x), np.float32(0)
    if quantum == np.float32(np.inf):
        quantum = np.float32(np.nan)  # and so are its products
    elif quantum > np.float32(0):
        per_one = np.float32(1) / quantum
    room = (_row_bytes(count) - BEHIND_ROW) // 2
    quanta = array(at, np.int16, room)
    for i in range(count):
        quanta[i] = np.int16(floor(x[i] * per_one + np.float32(0.5)))
    for i in range(count, room):
        quanta[i] = np.int16(0)
    array(at + 2 * room, np.float32, 1)[0] = quantum
