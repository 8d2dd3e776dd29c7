"""Drafts: guesses of the next tokens from the tokens before. They run as additional rows of a pass and are kept as long
as they equal the tokens that are chosen anyway; a wrong one costs time and changes nothing.

There are two sources: the text itself, after the last place that matches its end, and if given a table of what followed
two to four tokens in other texts. For each kind of match (its length, or the table's confidence) a sequence keeps a
moving average of how often it was right. It learns from every token, also where nothing was drafted, because a guess
costs nothing until it is run. A draft is run if it is more likely to be right than its row costs, so drafting stops
where it does not pay and starts again when it would.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from warpline.kernels.cpu.intrinsics import INNER, Number
from warpline.kernels.cpu.sizes import CLASSES, MOST_MATCH, ORDERS

#: Weight of the newest outcome in a moving average.
RATE = np.float32(1 / 16)
# An entry of the table is one word, so no thread sees half of one: how often it was right (8 bits), the token (24) and
# a part of its key (31).
_TOKEN, _TAG = 8, 32
_OFTEN = 255


@njit(**INNER)
def longest_match(tokens: np.ndarray, length: int) -> tuple[int, int]:
    """Return how many tokens at the end of a text also occur earlier in it, up to `MOST_MATCH`, and where that place
    ends; the newest of several. 0 if there is none."""
    size, place, last = 0, 0, tokens[length - 1]
    for end in range(length - 1, size, -1):
        if tokens[end - 1] == last:
            same = 1
            while same < min(MOST_MATCH, end) and tokens[end - 1 - same] == tokens[length - 1 - same]:
                same += 1
            if same > size:
                size, place = same, end
                if size == MOST_MATCH:
                    break
    return size, place


@njit(**INNER)
def _key(tokens: np.ndarray, length: int, order: int) -> int:
    """Return the hash of the last `order` tokens: 63 bits."""
    key = np.uint64(order)
    for i in range(length - order, length):
        key = np.uint64(np.uint64(key ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15))
        key = np.uint64(key ^ (key >> np.uint64(29)))
    return np.int64(key >> np.uint64(1))  # type: ignore[return-value]


@njit(**INNER)
def look_up(table: np.ndarray, tokens: np.ndarray, length: int, order: int) -> tuple[int, int]:
    """Return the token that followed the last `order` tokens, or -1; and the class of confidence, from 0."""
    if length < order:
        return -1, 0
    key = _key(tokens, length, order)
    entry = table[key & (len(table) - 1)]
    often = entry & _OFTEN
    if entry >> _TAG != key >> _TAG or often < 2:
        return -1, 0
    return (entry >> _TOKEN) & 0xFFFFFF, 0 if often < 4 else 1 if often < 10 else CLASSES - 1


@njit(**INNER)
def note(table: np.ndarray, tokens: np.ndarray, length: int) -> None:
    """Learn that the token at `length` followed those before it. An entry that is contradicted often enough is
    replaced."""
    token = tokens[length]
    for order in range(ORDERS[0], min(ORDERS[1], length) + 1):
        key = _key(tokens, length, order)
        entry = table[key & (len(table) - 1)]
        often = entry & _OFTEN
        if entry >> _TAG == key >> _TAG and (entry >> _TOKEN) & 0xFFFFFF == token:
            often = min(often + 1, _OFTEN)
        elif often <= 1:
            entry, often = (key >> _TAG) << _TAG | token << _TOKEN, 1
        else:
            often -= 1
        table[key & (len(table) - 1)] = entry & ~_OFTEN | often


@njit(**INNER)
def guess(
    tokens: np.ndarray, length: int, size: int, place: int, ahead: int, table: np.ndarray, chances: np.ndarray
) -> tuple[int, int]:
    """Return the guess of the token after `length` tokens, or -1, and its kind. The text's own match had `size` tokens
    and ended at `place`, `ahead` tokens ago."""
    token, kind = -1, 0
    if size > 0:
        token, kind = tokens[place + ahead], min(size + ahead, MOST_MATCH) - 1
    if len(table) > 0:
        for order in range(ORDERS[1], ORDERS[0] - 1, -1):
            found, sure = look_up(table, tokens, length, order)
            if found >= 0:
                its = MOST_MATCH + (order - ORDERS[0]) * CLASSES + sure
                if token < 0 or chances[its] > chances[kind]:
                    token, kind = found, its
                break
    return token, kind


@njit(**INNER)
def draft(
    tokens: np.ndarray, length: int, most: int, known: int, bar: Number, table: np.ndarray, chances: np.ndarray,
    guesses: np.ndarray,
) -> None:  # fmt: skip
    """Append up to `most` drafts to a text, as long as all of them together are right with a probability of at least
    `bar`. Tokens that are known already are used as they are."""
    guesses[0], guesses[1] = 0, -1
    if most <= 0:
        return
    if length < known:
        guesses[0] = min(most, known - length)
        return
    size, place = longest_match(tokens, length)
    from_text, chance = size > 0, np.float32(1)
    for ahead in range(most):
        token, kind = guess(tokens, length + ahead, size if from_text else 0, place, ahead, table, chances)
        if token < 0:
            return
        chance *= chances[kind]
        guesses[2 + ahead] = kind
        if ahead == 0:
            guesses[1] = token
        if chance < bar:
            return
        from_text = from_text and token == tokens[place + ahead]
        tokens[length + ahead] = token
        guesses[0] = ahead + 1


@njit(**INNER)
def learn(chances: np.ndarray, kind: int, was_right: bool) -> None:
    """Update the moving average of a kind with the outcome of a guess."""
    chances[kind] += ((np.float32(1) if was_right else np.float32(0)) - chances[kind]) * RATE
