"""Rows of x as integers, for products with int8 codes: integer sums do not depend on the order.

A row becomes 16-bit quanta, scaled so that its largest element uses the whole range. Rounding then loses less than
storing x in bf16, and about as much as fp16. CPUs multiply pairs of 16-bit values in one instruction.
Tried and lost: bytes, in two instructions for both halves of x: as fast with 64-byte vectors, slower with narrower
ones.
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
    """Return the value of a quantum of a row: 0 if the row is nearly zero, infinity if it is not finite."""
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
    """Store a row of x as quanta at an address, with zeros to the end of its last cache line and then the quantum."""
    count, quantum, per_one = len(x), quantum_of(x), np.float32(0)
    if quantum == np.float32(np.inf):
        quantum = np.float32(np.nan)  # so that its products are NaN too
    elif quantum > np.float32(0):
        per_one = np.float32(1) / quantum
    room = (_row_bytes(count) - BEHIND_ROW) // 2
    quanta = array(at, np.int16, room)
    for i in range(count):
        quanta[i] = np.int16(floor(x[i] * per_one + np.float32(0.5)))
    for i in range(count, room):
        quanta[i] = np.int16(0)
    array(at + 2 * room, np.float32, 1)[0] = quantum
