"""Chooses the next token from a row of logits, like `sampling` of the executors in torch.

Nothing is sorted. Top-k searches for a value that exactly k scores exceed. For top-p a token is drawn without it; if
the scores above it hold too much probability, it and all below are excluded, and another is drawn from what is left.
The result is the same as a draw from the filtered scores.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from warpline.kernels.cpu.arithmetic import exp, log
from warpline.kernels.cpu.intrinsics import INNER, Number, as_bits, as_float

#: For functions whose sums may be reordered, while infinities and NaN keep their meaning.
FINITE_OR_NOT = INNER | {"fastmath": {"nsz", "arcp", "contract", "afn", "reassoc"}}
_LOWEST = np.float32(-np.inf)


@njit(**INNER)
def gumbel(key: int, token: int) -> Number:
    """Return the noise of kernels/noise.py."""
    # numba computes in 64 bits unless each result is cast.
    bits = np.uint32(np.uint32(key) + np.uint32(token))
    bits = np.uint32(np.uint32(bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D))
    bits = np.uint32(np.uint32(bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B))
    bits = np.uint32(bits ^ (bits >> np.uint32(16)))
    uniform = min((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    rest = np.float32(1) - uniform
    # -log(1 - u) from the rounded 1 - u, plus what rounding took from u: exact where u is small and noise is large.
    return -log(uniform - (np.float32(1) - rest) - log(rest))


@njit(**FINITE_OR_NOT)
def _largest(scores: np.ndarray) -> int:
    """Return the index of the largest score, of equal ones the first."""
    top = scores[0]
    for i in range(len(scores)):
        top = max(top, scores[i])
    for i in range(len(scores)):
        if scores[i] == top:
            return i
    return 0


@njit(**INNER)
def _kth_bound(scores: np.ndarray, largest: Number, k: int) -> Number:
    """Return a value that k scores exceed, or with ties no more than necessary; found by bisection."""
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


@njit(**FINITE_OR_NOT)
def _weight_above(scores: np.ndarray, bar: Number, largest: Number) -> Number:
    total = np.float32(0)
    for i in range(len(scores)):
        weight = exp(scores[i] - largest)
        total += weight if scores[i] > bar else np.float32(0)
    return total


@njit(**INNER)
def _below(x: Number) -> Number:
    """Return the next smaller float."""
    if x == 0:
        return np.float32(-1.4e-45)
    return as_float(as_bits(x) + np.int32(1 if x < 0 else -1))


@njit(**INNER)
def penalise(scores: np.ndarray, past: np.ndarray, seen: np.ndarray, penalty: Number) -> None:
    """Apply the repetition penalty, once per token of the past. Requires: `seen` is as long as `scores`, and zero; it
    is zero again afterwards."""
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
    """Return the chosen token. `scores` are the logits and are overwritten; `noisy` is as long, and with `has_noise`
    already holds the noise."""
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


@njit(**FINITE_OR_NOT)
def _sum_of_exp(scores: np.ndarray, largest: Number) -> Number:
    total = np.float32(0)
    for i in range(len(scores)):
        total += exp(scores[i] - largest)
    return total


@njit(**FINITE_OR_NOT)
def _largest_below(scores: np.ndarray, bar: Number) -> Number:
    top = _LOWEST
    for i in range(len(scores)):
        top = max(top, scores[i] if scores[i] < bar else _LOWEST)
    return top


@njit(**INNER)
def log_probabilities(scores: np.ndarray, values: np.ndarray, tokens: np.ndarray) -> Number:
    """Return what to subtract from a logit to get its log-probability; store the largest log-probabilities with their
    tokens, of equal ones the first."""
    largest = scores[_largest(scores)]
    off = largest + log(_sum_of_exp(scores, largest))
    found, bar = 0, np.float32(np.inf)
    while found < len(values):
        bar = _largest_below(scores, bar)
        if not bar > _LOWEST:  # no other token has a probability
            break
        for i in range(len(scores)):
            if scores[i] == bar and found < len(values):
                values[found], tokens[found] = scores[i] - off, i
                found += 1
    return off
