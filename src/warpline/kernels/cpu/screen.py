"""Finds the logits that need not be computed: their bounds, from int8 codes, show that they are not the largest.

cuda/screen.cuh has the derivation. The hidden state is rounded to quanta (quanta.py), by at most half a quantum per
element.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from warpline.kernels.cpu.intrinsics import INNER, Number
from warpline.kernels.cpu.quanta import quantum_of
from warpline.kernels.cpu.sampling import FINITE_OR_NOT, gumbel


@njit(**INNER)
def length_of(x: np.ndarray) -> Number:
    """Return an upper bound of the length of x; infinity where a product could overflow or underflow."""
    squares = 0.0
    for i in range(len(x)):
        squares += np.float64(x[i]) * np.float64(x[i])
    length = math.sqrt(squares) * (1 + 2.0**-20)
    return np.float32(length) if 1e-15 < length < 1e18 else np.float32(np.inf)


@njit(**INNER)
def rest_of(x: np.ndarray, length: Number) -> Number:
    """Return the error for a row of the head of length 1: of rounding x, and of the sums in any order."""
    width = np.float32(len(x))
    return width * np.float32(2.0**-21) * length + np.float32(0.51) * np.float32(math.sqrt(width)) * quantum_of(x)


@njit(**FINITE_OR_NOT)
def mark_possible(
    scores: np.ndarray, errors: np.ndarray, norms: np.ndarray, length: Number, rest: Number, marks: np.ndarray
) -> None:
    """Mark the outputs whose true logit can be the largest. `scores` are the logits from codes."""
    least = np.float32(-np.inf)
    for i in range(len(scores)):
        least = max(least, scores[i] - _off(scores[i], errors[i], norms[i], length, rest))
    for i in range(len(scores)):
        marks[i] = not scores[i] + _off(scores[i], errors[i], norms[i], length, rest) < least


@njit(**FINITE_OR_NOT)
def mark_drawn(
    scores: np.ndarray, errors: np.ndarray, norms: np.ndarray, length: Number, rest: Number, marks: np.ndarray,
    temperature: Number, key: int, noise: np.ndarray,
) -> None:  # fmt: skip
    """Mark the outputs whose true logit plus noise can be the largest; the noise is stored in `noise`."""
    inverse_temperature = np.float32(1) / temperature
    for i in range(len(scores)):
        noise[i] = gumbel(key, i)
    least = np.float32(-np.inf)
    for i in range(len(scores)):
        low = (scores[i] - _off(scores[i], errors[i], norms[i], length, rest)) * inverse_temperature + noise[i]
        least = max(least, low)
    least -= abs(least) * np.float32(2.0**-20)  # for the rounding of sums with noise
    for i in range(len(scores)):
        high = (scores[i] + _off(scores[i], errors[i], norms[i], length, rest)) * inverse_temperature + noise[i]
        marks[i] = not high + abs(high) * np.float32(2.0**-20) < least


@njit(**INNER)
def _off(score: Number, error: Number, norm: Number, length: Number, rest: Number) -> Number:
    """Return the largest possible error of a score."""
    some = (length * error + rest * norm) * np.float32(1.001)
    return some + abs(score) * np.float32(2.0**-20) + np.float32(1e-30)
