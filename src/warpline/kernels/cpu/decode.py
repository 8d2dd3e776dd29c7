"""Many tokens in one call: every thread of a team runs this function, and they share the work of each stage.

The work of a stage is cut into pieces that any thread may take. A stage has ended when its pieces have, so no thread
waits for one that the system has put aside, unless that holds a piece; such a one finds nothing to do until it has
caught up. Each output of a product is computed by one thread in one order, so results depend neither on which took it
nor on how many threads there are. LayerNorm is done by every thread that needs it for itself, which saves a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from warpline.kernels.cpu.arithmetic import ACTIVATIONS, dot, exp, multiply, normalise, product_of
from warpline.kernels.cpu.choose import choose, penalise
from warpline.kernels.cpu.intrinsics import (
    INNER,
    Number,
    added,
    array,
    exchanged,
    load,
    matrix,
    seen,
    sleep,
    store,
    wake,
)  # fmt: skip
from warpline.kernels.cpu.screen import length_of, mark_drawn, mark_possible
from warpline.kernels.cpu.words import Begin, Form, Stage, Word

#: Times that a thread looks before it sleeps: some 30 µs.
PATIENCE = 15_000

_SINGLE, _WHOLE, _FLAG = np.float32, np.int64, np.uint8
_WORDS, _STAGE = len(Word), len(Stage)


@njit(**INNER)
def taken(at: np.ndarray, end: int) -> int:
    """The number of a piece below `end` that no other thread has, or -1."""
    while True:
        piece = seen(at[Word.NEXT.value])
        if piece >= end:
            return -1
        if exchanged(at[Word.NEXT.value], piece, piece + 1):
            return piece


@njit(**INNER)
def finished(at: np.ndarray, end: int) -> None:
    """A piece has ended; the last one of a stage wakes the threads that wait for it."""
    if added(at[Word.ENDED.value], 1) == end and seen(at[Word.ASLEEP.value]) > 0:
        wake(at[Word.ENDED.value])


@njit(**INNER)
def wait(at: np.ndarray, end: int) -> None:
    """Until all pieces below `end` have ended."""
    looks = 0
    while True:
        now = seen(at[Word.ENDED.value])
        if now >= end:
            return
        looks += 1
        if looks > PATIENCE:
            added(at[Word.ASLEEP.value], 1)
            now = seen(at[Word.ENDED.value])
            if now < end:
                sleep(at[Word.ENDED.value], now)
            added(at[Word.ASLEEP.value], -1)


@njit(**INNER, fastmath=True)
def attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, last: int, scale: Number, scores: np.ndarray,
    y: np.ndarray,
) -> None:  # fmt: skip
    """One head of one sequence: its query over the positions from `first` to `last`."""
    depth = len(q)
    top = np.float32(-3e38)
    for t in range(first, last):
        scores[t] = dot(keys[t], q, depth) * scale
        top = max(top, scores[t])
    total = np.float32(0)
    for t in range(first, last):
        scores[t] = exp(scores[t] - top)
        total += scores[t]
    for d in range(depth):
        y[d] = np.float32(0)
    for t in range(first, last):
        weight, row = scores[t] / total, values[t]
        for d in range(depth):
            y[d] += weight * load(row[d])


@njit(**INNER)
def number(address: int, i: int) -> Number:
    """One of several float32."""
    return array(address, _SINGLE, i + 1)[i]


@njit(**INNER)
def whole(address: int, i: int) -> int:
    """One of several int64."""
    return array(address, _WHOLE, i + 1)[i]


@njit(**INNER)
def banned_and_key(at: np.ndarray, slot: int) -> tuple[int, int]:
    """The token that must not come next, or -1, and the key of the next token's noise."""
    slots, capacity, place = at[Word.SLOTS.value], at[Word.CAPACITY.value], whole(at[Word.LENGTH.value], slot)
    stops = array(at[Word.STOPS_AT_EOS.value], _FLAG, slots)[slot] != 0
    banned = at[Word.EOS.value] if stops and place < whole(at[Word.MIN_LENGTH.value], slot) else -1
    return banned, matrix(at[Word.NOISE.value], np.int32, slots, capacity)[slot, min(place, capacity - 1)]


@njit(**INNER)
def append(at: np.ndarray, row: int, step: int) -> None:
    """The end of a row's step, as `Slots` describes it."""
    vocab, rows, capacity = at[Word.VOCAB.value], at[Word.ROWS.value], at[Word.CAPACITY.value]
    slots, eos, slot = at[Word.SLOTS.value], at[Word.EOS.value], whole(at[Word.SEQUENCES.value], row)
    logits = matrix(at[Word.LOGITS.value], _SINGLE, rows, vocab)[row]
    noisy, marks = (
        matrix(at[Word.NOISY.value], _SINGLE, rows, vocab)[row],
        matrix(at[Word.MARKS.value], _FLAG, rows, vocab)[row],
    )
    tokens = matrix(at[Word.TOKENS.value], _WHOLE, slots, capacity)[slot]
    stops = array(at[Word.STOPS_AT_EOS.value], _FLAG, slots)[slot] != 0
    place, finite = whole(at[Word.LENGTH.value], slot), True
    for i in range(vocab):
        finite &= np.isfinite(logits[i])
    if not finite:
        array(at[Word.BROKEN.value], _FLAG, slots)[slot] = 1
    banned, key = banned_and_key(at, slot)
    temperature, top_k, penalty = (
        number(at[Word.TEMPERATURE.value], slot),
        whole(at[Word.TOP_K.value], slot),
        number(at[Word.PENALTY.value], slot),
    )
    top_p, min_p = number(at[Word.TOP_P.value], slot), number(at[Word.MIN_P.value], slot)
    penalise(logits, tokens[:place], marks, penalty)
    biased = array(at[Word.BIASED.value], _FLAG, slots)[slot] != 0
    bias = matrix(at[Word.BIAS.value], _SINGLE, slots, vocab)[slot]
    if biased:
        for i in range(vocab):
            logits[i] += bias[i]
    chosen = choose(logits, noisy, banned, temperature, top_k, top_p, min_p, key, at[Word.SCREENS.value] != 0)
    if place >= whole(at[Word.KNOWN.value], slot):
        tokens[place] = chosen
    array(at[Word.LENGTH.value], _WHOLE, slots)[slot] = place + 1
    if biased:
        counts, token = matrix(at[Word.COUNTS.value], np.int32, slots, vocab)[slot], tokens[place]
        first = number(at[Word.PRESENCE.value], slot) if counts[token] == 0 else np.float32(0)
        bias[token] -= number(at[Word.FREQUENCY.value], slot) + first
        counts[token] += 1
    if (tokens[place] == eos and stops) or place + 1 >= whole(at[Word.LIMIT.value], slot):
        array(at[Word.DONE.value], _FLAG, slots)[slot] = 1
        if added(at[Word.GOING.value], -1) == 0:
            array(at[Word.STOP.value], _WHOLE, 1)[0] = step + 1  # seen by all when this piece has ended


def program(stored: Any, cached: Any, activation: str) -> Callable[[int, Any], None]:
    """The function for weights and a cache of numpy's types `stored` and `cached`."""
    activated, cell = ACTIVATIONS[activation], np.dtype(cached).itemsize

    @njit(**INNER)
    def embed(at: np.ndarray, row: int) -> None:
        width, vocab, slot = at[Word.WIDTH.value], at[Word.VOCAB.value], whole(at[Word.SEQUENCES.value], row)
        positions = array(at[Word.POSITIONS.value], _WHOLE, at[Word.ROWS.value])
        if at[Word.BEGIN.value] == Begin.NEWEST.value:
            positions[row] = whole(at[Word.LENGTH.value], slot) - 1
        position = positions[row]
        token = matrix(at[Word.TOKENS.value], _WHOLE, at[Word.SLOTS.value], at[Word.CAPACITY.value])[slot, position]
        scale = np.float32(1)
        if at[Word.EMBEDDING_SCALES.value] != 0:
            scale = number(at[Word.EMBEDDING_SCALES.value], token)
        here = array(at[Word.EMBEDDING.value], stored, vocab * width)[token * width : token * width + width]
        place = array(at[Word.PLACES.value], _SINGLE, (position + 1) * width)[
            position * width : position * width + width
        ]
        x = matrix(at[Word.X.value], _SINGLE, at[Word.ROWS.value], width)[row]
        for i in range(width):
            x[i] = load(here[i]) * scale + place[i]

    @njit(**INNER)
    def product(at: np.ndarray, stage: np.ndarray, piece: int, x: np.ndarray, row: np.ndarray) -> None:
        outputs, form = stage[Stage.OUTPUTS.value], stage[Stage.FORM.value]
        first, last = outputs * piece // stage[Stage.PIECES.value], outputs * (piece + 1) // stage[Stage.PIECES.value]
        scales = array(stage[Stage.SCALES.value], _SINGLE, outputs if stage[Stage.SCALES.value] != 0 else 0)
        bias = array(stage[Stage.BIAS.value], _SINGLE, outputs if stage[Stage.BIAS.value] != 0 else 0)
        y = matrix(stage[Stage.TARGET.value], _SINGLE, at[Word.ROWS.value], outputs)
        if at[Word.SCREENS.value] != 0 and stage[Stage.CODES.value] != 0:
            codes = array(stage[Stage.CODES.value], np.int8, outputs * stage[Stage.INPUTS.value])
            multiply(
                codes, array(stage[Stage.CODE_SCALES.value], _SINGLE, outputs), bias, x, y, first, last, False, row
            )
            return
        weights = array(stage[Stage.MATRIX.value], stored, outputs * stage[Stage.INPUTS.value])
        multiply(weights, scales, bias, x, y, first, last, form == Form.ADDED.value, row)
        if form == Form.ACTIVATED.value:
            for r in range(len(y)):
                here = y[r]
                for i in range(first, last):
                    here[i] = activated(here[i])

    @njit(**INNER)
    def rescore(at: np.ndarray, stage: np.ndarray, r: int, private: int) -> None:
        """Of the logits of a row, which codes have made, those anew that can be the largest."""
        rows, width, vocab = at[Word.ROWS.value], at[Word.WIDTH.value], at[Word.VOCAB.value]
        normal, row = matrix(private, _SINGLE, rows, width), array(private + 4 * rows * width, _SINGLE, width)
        x = matrix(at[Word.X.value], _SINGLE, rows, width)
        weight, bias = (
            array(stage[Stage.NORM.value], _SINGLE, width),
            array(stage[Stage.NORM_BIAS.value], _SINGLE, width),
        )
        for near in range(r - r % 4, min(rows, r - r % 4 + 4)):
            normalise(x[near], weight, bias, number(at[Word.SETTINGS.value], 0), normal[near])
        slot = whole(at[Word.SEQUENCES.value], r)
        banned, key = banned_and_key(at, slot)
        logits = matrix(at[Word.LOGITS.value], _SINGLE, rows, vocab)[r]
        marks = matrix(at[Word.MARKS.value], _FLAG, rows, vocab)[r]
        if banned >= 0:
            logits[banned] = np.float32(-np.inf)  # which excludes nothing else
        errors, norms = (
            array(stage[Stage.ERRORS.value], _SINGLE, vocab),
            array(stage[Stage.NORMS.value], _SINGLE, vocab),
        )
        length, temperature = length_of(normal[r]), number(at[Word.TEMPERATURE.value], slot)
        if temperature > 0:
            noisy = matrix(at[Word.NOISY.value], _SINGLE, rows, vocab)[r]
            mark_drawn(logits, errors, norms, length, width, marks, temperature, key, noisy)
        else:
            mark_possible(logits, errors, norms, length, width, marks)
        weights = array(stage[Stage.MATRIX.value], stored, vocab * width)
        for i in range(vocab):
            if marks[i] != 0:
                logits[i] = product_of(weights, normal, r, i, row)
                marks[i] = 0

    @njit(**INNER)
    def attention(at: np.ndarray, stage: np.ndarray, piece: int, scores: np.ndarray) -> None:
        """One head of one row, or its keys and values."""
        heads, width, capacity = at[Word.HEADS.value], at[Word.WIDTH.value], at[Word.CAPACITY.value]
        depth = width // heads
        r, head = piece // heads, piece % heads
        slot, position = whole(at[Word.SEQUENCES.value], r), whole(at[Word.POSITIONS.value], r)
        begin = (slot * heads + head) * capacity * depth * cell
        keys = matrix(stage[Stage.KEYS.value] + begin, cached, capacity, depth)
        values = matrix(stage[Stage.VALUES.value] + begin, cached, capacity, depth)
        qkv = matrix(stage[Stage.SOURCE.value], _SINGLE, at[Word.ROWS.value], 3 * width)[r]
        column = head * depth
        if stage[Stage.FORM.value] == Form.CACHED.value or at[Word.BEGIN.value] == Begin.NEWEST.value:
            for d in range(depth):
                store(keys[position], d, qkv[width + column + d])
                store(values[position], d, qkv[2 * width + column + d])
        if stage[Stage.FORM.value] == Form.ATTENTION.value:
            window = at[Word.WINDOW.value]
            first = max(0, position + 1 - window) if window > 0 else 0
            y = matrix(stage[Stage.TARGET.value], _SINGLE, at[Word.ROWS.value], width)[r][column : column + depth]
            scale = number(at[Word.SETTINGS.value], stage[Stage.SCALE.value])
            attend(qkv[column : column + depth], keys, values, first, position + 1, scale, scores, y)

    @njit(**INNER)
    def staged(at: np.ndarray, stage: np.ndarray, base: int, end: int, private: int) -> None:
        """The pieces of a stage that no other thread takes."""
        rows, width = at[Word.ROWS.value], at[Word.WIDTH.value]
        row = array(private + 4 * rows * width, _SINGLE, at[Word.PRIVATE_SIZE.value] - rows * width)
        normal = matrix(private, _SINGLE, rows, width)
        x = matrix(stage[Stage.SOURCE.value], _SINGLE, rows, stage[Stage.INPUTS.value])
        normalised = stage[Stage.NORM.value] == 0
        piece = taken(at, end)
        while piece >= 0:
            if stage[Stage.FORM.value] >= Form.CACHED.value:
                attention(at, stage, piece - base, row)
            else:
                if not normalised:
                    weight = array(stage[Stage.NORM.value], _SINGLE, width)
                    bias = array(stage[Stage.NORM_BIAS.value], _SINGLE, width)
                    epsilon = number(at[Word.SETTINGS.value], 0)
                    for r in range(rows):
                        normalise(x[r], weight, bias, epsilon, normal[r])
                    x, normalised = normal, True
                product(at, stage, piece - base, x, row)
            finished(at, end)
            piece = taken(at, end)
        wait(at, end)

    def decode(me: int, words: int) -> None:
        """Up to so many steps of the rows that are not done. Every thread of the team calls it with its own number."""
        at = array(words, _WHOLE, _WORDS)
        rows, begin = at[Word.ROWS.value], at[Word.BEGIN.value]
        private = at[Word.PRIVATE.value] + 4 * me * at[Word.PRIVATE_SIZE.value]
        stages = matrix(words + 8 * _WORDS, _WHOLE, at[Word.STAGES.value], _STAGE)
        base = 0  # pieces before the stage
        for step in range(at[Word.STEPS.value]):
            if seen(at[Word.STOP.value]) <= step:
                break
            if begin != Begin.READY.value:
                piece = taken(at, base + rows)
                while piece >= 0:
                    embed(at, piece - base)
                    finished(at, base + rows)
                    piece = taken(at, base + rows)
                wait(at, base + rows)
                base += rows
            for number in range(at[Word.FIRST.value], at[Word.LAST.value]):
                stage = stages[number]
                if stage[Stage.FORM.value] == Form.CACHED.value and begin == Begin.NEWEST.value:
                    continue
                staged(at, stage, base, base + stage[Stage.PIECES.value], private)
                base += stage[Stage.PIECES.value]
            if at[Word.CHOOSES.value] != 0:
                done = array(at[Word.DONE.value], _FLAG, at[Word.SLOTS.value])
                piece = taken(at, base + rows)
                while piece >= 0:
                    if done[whole(at[Word.SEQUENCES.value], piece - base)] == 0:
                        if at[Word.SCREENS.value] != 0:
                            rescore(at, stages[at[Word.LAST.value] - 1], piece - base, private)
                        append(at, piece - base, step)
                    if piece == base and seen(at[Word.HALT.value]) != 0:  # asked by one thread, so that all agree
                        array(at[Word.STOP.value], _WHOLE, 1)[0] = step + 1
                    finished(at, base + rows)
                    piece = taken(at, base + rows)
                wait(at, base + rows)
                base += rows

    return decode
