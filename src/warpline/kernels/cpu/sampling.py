"""From a row of logits to its next token, as `sampling` of the executors has it in torch.

Nothing is sorted. Top-k is a search for a value that just k scores exceed. For top-p a token is drawn as if there were
no top-p; if too much lies above it, it and all below are out of the question and another is drawn from what is left,
which ends where a draw from the filtered scores would.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from warpline.kernels.cpu.arithmetic import exp, log
from warpline.kernels.cpu.intrinsics import INNER, Number, as_bits, as_float

#: Sums in any order, but infinities and what is no number keep their meaning.
FINITE_OR_NOT = {"nsz", "arcp", "contract", "afn", "reassoc"}
_LOWEST = np.float32(-np.inf)


@njit(**INNER)
def gumbel(key: int, token: int) -> Number:
    """The noise of kernels/noise.py."""
    # Compiled code computes in 64 bits unless it is told to forget the upper half.
    bits = np.uint32(np.uint32(key) + np.uint32(token))
    bits = np.uint32(np.uint32(bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D))
    bits = np.uint32(np.uint32(bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B))
    bits = np.uint32(bits ^ (bits >> np.uint32(16)))
    uniform = min((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    rest = np.float32(1) - uniform
    # log(1 - u) from the rounded 1 - u, corrected for that rounding: exact where u is small and noise is large.
    exponential = uniform if rest == np.float32(1) else log(rest) * (uniform / (rest - np.float32(1)))
    return -log(exponential)


@njit(**INNER, fastmath=FINITE_OR_NOT)
def _largest(scores: np.ndarray) -> int:
    """Where it is, and of equals the first."""
    top = scores[0]
    for i in range(len(scores)):
        top = max(top, scores[i])
    for i in range(len(scores)):
        if scores[i] == top:
            return i
    return 0


@njit(**INNER)
def _kth_bound(scores: np.ndarray, largest: Number, k: int) -> Number:
    """A value that k scores exceed, or if several are equal there, no more than must: found by halving."""
    low, high = np.float32(largest - 1), np.float32(largest)
    while _above(scores, low) < k and low > largest - 1e9:
        low = largest - 2 * (largest - low)
    while True:
        middle = np.float32((np.float64(low) + np.float64(high)) / 2)
        if middle <= low or middle >= high:
            return low
        found = _above(scores, middle)
        if found == k:
            return middle
        if found < k:
            high = middle
        else:
            low = middle


@njit(**INNER)
def _above(scores: np.ndarray, bar: Number) -> Number:
    count = np.int32(0)
    for i in range(len(scores)):
        count += np.int32(scores[i] > bar)
    return count


@njit(**INNER, fastmath=FINITE_OR_NOT)
def _weight_above(scores: np.ndarray, bar: Number, largest: Number) -> Number:
    total = np.float32(0)
    for i in range(len(scores)):
        weight = exp(scores[i] - largest)
        total += weight if scores[i] > bar else np.float32(0)
    return total


@njit(**INNER)
def _below(x: Number) -> Number:
    """The next smaller number."""
    if x == 0:
        return np.float32(-1.4e-45)
    return as_float(as_bits(x) + np.int32(1 if x < 0 else -1))


@njit(**INNER)
def penalise(scores: np.ndarray, past: np.ndarray, seen: np.ndarray, penalty: Number) -> None:
    """The repetition penalty, for each token of the past once. `seen` is as long as `scores`, and zero."""
    if penalty == 1:
        return
    for token in past:
        if seen[token] == 0:
            seen[token] = 1
            value = scores[token]
            scores[token] = value / penalty if value > 0 else value * penalty
    for token in past:
        seen[token] = 0


@njit(**INNER)
def sample_token(
    scores: np.ndarray,
    noisy: np.ndarray,
    banned: int,
    temperature: Number,
    top_k: int,
    top_p: Number,
    min_p: Number,
    key: int,
    has_noise: bool,
) -> int:
    """The token. `scores` are the logits, which are changed; `noisy` is as long and may have the noise already."""
    if banned >= 0:
        scores[banned] = _LOWEST
    if temperature <= 0:
        return _largest(scores)
    inverse_temperature = np.float32(1) / temperature
    for i in range(len(scores)):
        scores[i] *= inverse_temperature
    largest = scores[_largest(scores)]
    bar = _LOWEST
    if top_k < len(scores):
        bar = _kth_bound(scores, largest, top_k)
    total = _weight_above(scores, bar, largest) if top_p < 1 else np.float32(0)
    if min_p > 0:
        bar = max(bar, _below(np.float32(largest + np.float32(math.log(min_p)))))
    for i in range(len(scores)):
        noisy[i] = scores[i] + (noisy[i] if has_noise else gumbel(key, i))
    while True:
        for i in range(len(scores)):
            if not scores[i] > bar:
                noisy[i] = _LOWEST
        drawn = _largest(noisy)
        if top_p >= 1 or scores[drawn] >= largest or _weight_above(scores, scores[drawn], largest) < top_p * total:
            return drawn
        bar = scores[drawn]


@njit(**INNER, fastmath=FINITE_OR_NOT)
def _sum_of_exp(scores: np.ndarray, largest: Number) -> Number:
    total = np.float32(0)
    for i in range(len(scores)):
        total += exp(scores[i] - largest)
    return total


@njit(**INNER, fastmath=FINITE_OR_NOT)
def _largest_below(scores: np.ndarray, bar: Number) -> Number:
    top = _LOWEST
    for i in range(len(scores)):
        top = max(top, scores[i] if scores[i] < bar else _LOWEST)
    return top


@njit(**INNER)
def log_probabilities(scores: np.ndarray, values: np.ndarray, tokens: np.ndarray) -> Number:
    """What to take off a logit to have the logarithm of its probability; the largest of these with their tokens, of
    equal ones the first."""
    largest = scores[_largest(scores)]
    off = largest + log(_sum_of_exp(scores, largest))
    found, bar = 0, np.float32(np.inf)
    while found < len(values):
        bar = _largest_below(scores, bar)
        if not bar > _LOWEST:  # nothing more has a probability
            break
        for i in range(len(scores)):
            if scores[i] == bar and found < len(values):
                values[found], tokens[found] = scores[i] - off, i
                found += 1
    return off
