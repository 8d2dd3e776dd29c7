"""Finds the logits that need not be computed: their bounds, from int8 codes, show that they do not decide which token
is drawn.

cuda/screen.cuh has the derivation. The hidden state is rounded to quanta (quanta.py), by at most half a quantum per
element.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from warpline.kernels.cpu.arithmetic import exp
from warpline.kernels.cpu.intrinsics import INNER, Number
from warpline.kernels.cpu.quanta import quantum_of
from warpline.kernels.cpu.sampling import FINITE_OR_NOT, gumbel

#: Marks of outputs: the logit is to be computed, and it has been.
WANTED, KNOWN = 1, 2


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


# --- top-p ------------------------------------------------------------------------------------------------------------
# A token is drawn without it, and kept if the tokens above it weigh less than the share top_p of all (sampling.py).
# Bounds of all logits bound both weights, which nearly always decides. Sums round, and each weight as well: relative to
# the sums of a full pass, the sums here may be off by `_rounding`.


@njit(**INNER)
def _rounding(count: int) -> Number:
    return np.float32(count + 64) * np.float32(2.0**-23) + np.float32(2.0**-15)


@njit(**FINITE_OR_NOT)
def _weights(
    scores: np.ndarray, errors: np.ndarray, norms: np.ndarray, length: Number, rest: Number, marks: np.ndarray,
    inverse_temperature: Number, drawn: int, sign: Number,
) -> tuple[Number, Number]:  # fmt: skip
    """Return the most that outputs above the drawn one can weigh, in units of its weight, and a bound for the others:
    from below if `sign` is -1, from above if it is 1. Scores of marked outputs are exact."""
    bar, above, others = scores[drawn] * inverse_temperature, np.float32(0), np.float32(0)
    for i in range(len(scores)):
        off = _off(scores[i], errors[i], norms[i], length, rest) if marks[i] == 0 else np.float32(0)
        is_above = (scores[i] + off) * inverse_temperature > bar and (sign < 0 or marks[i] != 0)
        weight = exp((scores[i] + (off if is_above else sign * off)) * inverse_temperature - bar)
        above += weight if is_above else np.float32(0)
        others += np.float32(0) if is_above else weight
    return above, others


@njit(**INNER)
def is_within(
    scores: np.ndarray, errors: np.ndarray, norms: np.ndarray, length: Number, rest: Number, marks: np.ndarray,
    inverse_temperature: Number, drawn: int, top_p: Number,
) -> bool:  # fmt: skip
    """Whether top-p certainly keeps a token whose logit is known. Outputs whose logit is known are marked."""
    sign, e = np.float32(-1), _rounding(len(scores))
    above, others = _weights(scores, errors, norms, length, rest, marks, inverse_temperature, drawn, sign)
    return above * ((1 + e) - top_p * (1 - e)) < top_p * (1 - e) * others


@njit(**INNER)
def is_beyond(
    scores: np.ndarray, errors: np.ndarray, norms: np.ndarray, length: Number, rest: Number, marks: np.ndarray,
    inverse_temperature: Number, drawn: int, top_p: Number,
) -> bool:  # fmt: skip
    """Whether top-p certainly excludes a token. Requires: all outputs that may be above it are marked."""
    sign, e = np.float32(1), _rounding(len(scores))
    above, others = _weights(scores, errors, norms, length, rest, marks, inverse_temperature, drawn, sign)
    return above * ((1 - e) - top_p * (1 + e)) > top_p * (1 + e) * others


@njit(**INNER)
def mark_above(
    scores: np.ndarray,
    errors: np.ndarray,
    norms: np.ndarray,
    length: Number,
    rest: Number,
    marks: np.ndarray,
    than: int,
) -> None:
    """Mark, beside the outputs whose logit is known, those whose logit may be larger than that of `than`."""
    for i in range(len(scores)):
        if marks[i] == 0 and not scores[i] + _off(scores[i], errors[i], norms[i], length, rest) <= scores[than]:
            marks[i] = WANTED


@njit(**INNER)
def drawn_above(
    scores: np.ndarray, noise: np.ndarray, marks: np.ndarray, inverse_temperature: Number, bar: Number
) -> int:
    """Return the output that is drawn from those whose logit is known and above a bar, or -1 if there are none."""
    found, best = -1, np.float32(-np.inf)
    for i in range(len(scores)):
        score = scores[i] * inverse_temperature
        if marks[i] != 0 and score > bar and score + noise[i] > best:
            found, best = i, score + noise[i]
    return found
