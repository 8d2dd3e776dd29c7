"""Many tokens in one call: every thread of a team runs this function, and they share the work of each stage.

The work of a stage is cut into pieces that any thread may take. A stage has ended when its pieces have, so no thread
waits for one that the system has put aside, unless that holds a piece; such a one finds nothing to do until it has
caught up. So the number of pieces is the same in all steps of a call, whatever rows they have. Each output of a product
is computed by one thread in one order, so results depend neither on which took it nor on how many threads there are,
nor on the other rows. LayerNorm is done by every thread that needs it for itself, which saves a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from warpline.kernels.cpu.arithmetic import ACTIVATIONS, dot, exp, normalise
from warpline.kernels.cpu.draft import COUNTS
from warpline.kernels.cpu.intrinsics import INNER, Number, added, array, load, matrix, seen, store
from warpline.kernels.cpu.lanes import (
    FLAG,
    SINGLE,
    WHOLE,
    append,
    banned_and_key,
    draft_next,
    judged,
    lay_out,
    number,
    whole,
)  # fmt: skip
from warpline.kernels.cpu.products import multiply_of, product_of
from warpline.kernels.cpu.screen import length_of, mark_drawn, mark_possible
from warpline.kernels.cpu.sharing import finished, taken, wait
from warpline.kernels.cpu.words import Begin, Form, Stage, Word

_WORDS, _STAGE = len(Word), len(Stage)


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


def program(stored: Any, cached: Any, activation: str) -> Callable[[int, Any], None]:
    """The function for weights and a cache of numpy's types `stored` and `cached`."""
    activated, cell = ACTIVATIONS[activation], np.dtype(cached).itemsize
    multiply, multiply_codes, logit = multiply_of(stored), multiply_of(np.int8), product_of(stored)

    @njit(**INNER)
    def embed_row(at: np.ndarray, row: int) -> None:
        width, vocab, slot = at[Word.WIDTH.value], at[Word.VOCAB.value], whole(at[Word.SEQUENCES.value], row)
        positions = array(at[Word.POSITIONS.value], WHOLE, at[Word.ROWS.value])
        if at[Word.BEGIN.value] == Begin.NEWEST.value and at[Word.DRAFTS.value] == 0:
            positions[row] = whole(at[Word.LENGTH.value], slot) - 1
        position = positions[row]
        token = matrix(at[Word.TOKENS.value], WHOLE, at[Word.SLOTS.value], at[Word.CAPACITY.value])[slot, position]
        scale = np.float32(1)
        if at[Word.EMBEDDING_SCALES.value] != 0:
            scale = number(at[Word.EMBEDDING_SCALES.value], token)
        here = array(at[Word.EMBEDDING.value], stored, vocab * width)[token * width : token * width + width]
        place = array(at[Word.PLACES.value], SINGLE, (position + 1) * width)[
            position * width : position * width + width
        ]
        x = matrix(at[Word.X.value], SINGLE, at[Word.ROWS.value], width)[row]
        for i in range(width):
            x[i] = load(here[i]) * scale + place[i]

    @njit(**INNER)
    def embed(at: np.ndarray, piece: int) -> None:
        """A row, or of newest tokens those of a lane."""
        if at[Word.BEGIN.value] == Begin.NEWEST.value:
            firsts = array(at[Word.FIRSTS.value], WHOLE, at[Word.LANES.value] + 1)
            for row in range(firsts[piece], firsts[piece + 1]):
                embed_row(at, row)
        else:
            embed_row(at, piece)

    @njit(**INNER)
    def product(at: np.ndarray, stage: np.ndarray, piece: int, x: int, room: int) -> None:
        outputs, inputs, rows = stage[Stage.OUTPUTS.value], stage[Stage.INPUTS.value], at[Word.ROWS.value]
        first, last = outputs * piece // stage[Stage.PIECES.value], outputs * (piece + 1) // stage[Stage.PIECES.value]
        scales = array(stage[Stage.SCALES.value], SINGLE, outputs if stage[Stage.SCALES.value] != 0 else 0)
        bias = array(stage[Stage.BIAS.value], SINGLE, outputs if stage[Stage.BIAS.value] != 0 else 0)
        y, form = matrix(stage[Stage.TARGET.value], SINGLE, rows, outputs), stage[Stage.FORM.value]
        if at[Word.SCREENS.value] != 0 and stage[Stage.CODES.value] != 0:
            scales = array(stage[Stage.CODE_SCALES.value], SINGLE, outputs)
            multiply_codes(stage[Stage.CODES.value], scales, bias, x, rows, inputs, y, first, last, False, room)
            return
        adds = form == Form.ADDED.value
        multiply(stage[Stage.MATRIX.value], scales, bias, x, rows, inputs, y, first, last, adds, room)
        if form == Form.ACTIVATED.value:
            for r in range(rows):
                here = y[r]
                for i in range(first, last):
                    here[i] = activated(here[i])

    @njit(**INNER)
    def rescore(at: np.ndarray, stage: np.ndarray, r: int, slot: int, private: int) -> None:
        """Of the logits of a row, which codes have made, those anew that can be the largest."""
        rows, width, vocab = at[Word.ROWS.value], at[Word.WIDTH.value], at[Word.VOCAB.value]
        x, normal = matrix(at[Word.X.value], SINGLE, rows, width), array(private, SINGLE, width)
        weight, bias = (
            array(stage[Stage.NORM.value], SINGLE, width),
            array(stage[Stage.NORM_BIAS.value], SINGLE, width),
        )
        normalise(x[r], weight, bias, number(at[Word.SETTINGS.value], 0), normal)
        banned, key = banned_and_key(at, slot)
        logits = matrix(at[Word.LOGITS.value], SINGLE, rows, vocab)[r]
        marks = matrix(at[Word.MARKS.value], FLAG, rows, vocab)[r]
        if banned >= 0:
            logits[banned] = np.float32(-np.inf)  # which excludes nothing else
        errors, norms = (
            array(stage[Stage.ERRORS.value], SINGLE, vocab),
            array(stage[Stage.NORMS.value], SINGLE, vocab),
        )
        length, temperature = length_of(normal), number(at[Word.TEMPERATURE.value], slot)
        if temperature > 0:
            noisy = matrix(at[Word.NOISY.value], SINGLE, rows, vocab)[r]
            mark_drawn(logits, errors, norms, length, width, marks, temperature, key, noisy)
        else:
            mark_possible(logits, errors, norms, length, width, marks)
        for i in range(vocab):
            if marks[i] != 0:
                logits[i] = logit(stage[Stage.MATRIX.value], private, width, i, private + 4 * width)
                marks[i] = 0

    @njit(**INNER)
    def attention(at: np.ndarray, stage: np.ndarray, piece: int, scores: np.ndarray) -> None:
        """One head of one row, or its keys and values; of newest tokens one head of one lane, and both."""
        heads, width, capacity = at[Word.HEADS.value], at[Word.WIDTH.value], at[Word.CAPACITY.value]
        depth, newest, rows = width // heads, at[Word.BEGIN.value] == Begin.NEWEST.value, at[Word.ROWS.value]
        first_row, head = piece // heads, piece % heads
        end_row, column = first_row + 1, head * depth
        if newest:
            firsts = array(at[Word.FIRSTS.value], WHOLE, at[Word.LANES.value] + 1)
            first_row, end_row = firsts[first_row], firsts[end_row]
            if first_row == end_row:
                return
        begin = (whole(at[Word.SEQUENCES.value], first_row) * heads + head) * capacity * depth * cell
        keys = matrix(stage[Stage.KEYS.value] + begin, cached, capacity, depth)
        values = matrix(stage[Stage.VALUES.value] + begin, cached, capacity, depth)
        qkv = matrix(stage[Stage.SOURCE.value], SINGLE, rows, 3 * width)
        if stage[Stage.FORM.value] == Form.CACHED.value or newest:
            for r in range(first_row, end_row):
                position = whole(at[Word.POSITIONS.value], r)
                for d in range(depth):
                    store(keys[position], d, qkv[r, width + column + d])
                    store(values[position], d, qkv[r, 2 * width + column + d])
        if stage[Stage.FORM.value] == Form.ATTENTION.value:
            window, scale = at[Word.WINDOW.value], number(at[Word.SETTINGS.value], stage[Stage.SCALE.value])
            target = matrix(stage[Stage.TARGET.value], SINGLE, rows, width)
            for r in range(first_row, end_row):
                end = whole(at[Word.POSITIONS.value], r) + 1
                first = max(0, end - window) if window > 0 else 0
                y = target[r][column : column + depth]
                attend(qkv[r][column : column + depth], keys, values, first, end, scale, scores, y)

    @njit(**INNER)
    def staged(at: np.ndarray, stage: np.ndarray, base: int, end: int, private: int) -> None:
        """The pieces of a stage that no other thread takes."""
        width = at[Word.WIDTH.value]
        x, normalised = stage[Stage.SOURCE.value], stage[Stage.NORM.value] == 0
        piece = taken(at, end)
        while piece >= 0:
            rows = at[Word.ROWS.value]  # only who has a piece knows which pass it is
            room = private + 4 * rows * width
            if stage[Stage.FORM.value] >= Form.CACHED.value:
                attention(at, stage, piece - base, array(room, SINGLE, at[Word.CAPACITY.value]))
            else:
                if not normalised:
                    weight = array(stage[Stage.NORM.value], SINGLE, width)
                    bias = array(stage[Stage.NORM_BIAS.value], SINGLE, width)
                    epsilon = number(at[Word.SETTINGS.value], 0)
                    source, normal = matrix(x, SINGLE, rows, width), matrix(private, SINGLE, rows, width)
                    for r in range(rows):
                        normalise(source[r], weight, bias, epsilon, normal[r])
                    x, normalised = private, True
                product(at, stage, piece - base, x, room)
            finished(at, end)
            piece = taken(at, end)
        wait(at, end)

    @njit(**INNER)
    def choose_next(at: np.ndarray, head: np.ndarray, lane: int, step: int, private: int) -> None:
        """The end of a lane's step: a token of its newest row, and of each row behind a draft that was right."""
        slots, drafts = at[Word.SLOTS.value], at[Word.DRAFTS.value]
        slot, firsts = (
            whole(at[Word.LANE_SLOTS.value], lane),
            array(at[Word.FIRSTS.value], WHOLE, at[Word.LANES.value] + 1),
        )
        done, first = array(at[Word.DONE.value], FLAG, slots), firsts[lane]
        if done[slot] != 0:
            return
        tokens = matrix(at[Word.TOKENS.value], WHOLE, slots, at[Word.CAPACITY.value])[slot]
        kept = 0
        for row in range(first, firsts[lane + 1]):
            place = whole(at[Word.LENGTH.value], slot)
            drafted = tokens[place]
            if at[Word.SCREENS.value] != 0:
                rescore(at, head, row, slot, private)
            append(at, row, slot, step)
            if drafts == 0 or not judged(at, slot, row - first, place, drafted):
                break
            kept += 1
            if done[slot] != 0:
                break
        if drafts > 0:
            counted = matrix(at[Word.COUNTED.value], WHOLE, slots, COUNTS)[slot]
            counted[0] += 1
            counted[1] += firsts[lane + 1] - first - 1
            counted[2] += kept
            if done[slot] == 0:
                draft_next(at, slot)

    @njit(**INNER)
    def plan(at: np.ndarray) -> None:
        """The first pass of a call with drafts."""
        for lane in range(at[Word.LANES.value]):
            draft_next(at, whole(at[Word.LANE_SLOTS.value], lane))
        lay_out(at)

    def decode(me: int, words: int) -> None:
        """Up to so many steps of the lanes that are not done. Every thread of the team calls it with its own number."""
        at = array(words, WHOLE, _WORDS)
        lanes, begin, drafts = at[Word.LANES.value], at[Word.BEGIN.value], at[Word.DRAFTS.value]
        private = at[Word.PRIVATE.value] + 4 * me * at[Word.PRIVATE_SIZE.value]
        stages = matrix(words + 8 * _WORDS, WHOLE, at[Word.STAGES.value], _STAGE)
        base, steps = 0, 0  # pieces before the stage; steps taken
        if drafts > 0:
            if taken(at, 1) == 0:
                plan(at)
                finished(at, 1)
            base = 1
            wait(at, base)
        for step in range(at[Word.STEPS.value]):
            if seen(at[Word.STOP.value]) <= step:
                break
            if begin != Begin.READY.value:
                piece = taken(at, base + lanes)
                while piece >= 0:
                    embed(at, piece - base)
                    finished(at, base + lanes)
                    piece = taken(at, base + lanes)
                wait(at, base + lanes)
                base += lanes
            for stage_number in range(at[Word.FIRST.value], at[Word.LAST.value]):
                stage = stages[stage_number]
                if stage[Stage.FORM.value] == Form.CACHED.value and begin == Begin.NEWEST.value:
                    continue
                pieces = stage[Stage.PIECES.value]
                if pieces == 0:
                    pieces = lanes * at[Word.HEADS.value]
                staged(at, stage, base, base + pieces, private)
                base += pieces
            steps = step + 1
            if at[Word.CHOOSES.value] != 0:
                piece = taken(at, base + lanes)
                while piece >= 0:
                    choose_next(at, stages[at[Word.LAST.value] - 1], piece - base, step, private)
                    if piece == base and seen(at[Word.HALT.value]) != 0:  # asked by one thread, so that all agree
                        array(at[Word.STOP.value], WHOLE, 1)[0] = step + 1
                    if drafts > 0 and added(at[Word.LEFT.value], -1) == 0:
                        lay_out(at)  # all lanes have their drafts, and nobody goes on before this piece has ended
                    finished(at, base + lanes)
                    piece = taken(at, base + lanes)
                wait(at, base + lanes)
                base += lanes
        if me == 0:
            at[Word.PASSES.value] = steps

    return decode
