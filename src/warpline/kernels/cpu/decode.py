"""Decodes many tokens in one call: every thread of a team runs this function, and they share the work of each stage.

The idea: a stage is divided into pieces that any thread may take, and ends when its pieces have ended. So threads do
not wait for one that the system has descheduled, unless it holds a piece; such a thread finds no work until it has
caught up. Requires: the number of pieces is the same in all steps of a call, whatever their rows. One thread computes
each output of a product in a fixed order, so results do not depend on the thread, on the number of threads, or on other
rows. With few rows every thread computes LayerNorm itself, which saves a stage; many rows are prepared together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from warpline.kernels.cpu.arithmetic import ACTIVATIONS, normalise
from warpline.kernels.cpu.attention import attend_of
from warpline.kernels.cpu.intrinsics import INNER, add_fetch, array, atomic_load, clock, load, matrix, store
from warpline.kernels.cpu.lanes import (
    FLAG,
    FLOAT32,
    INT64,
    append,
    draft_next,
    float_at,
    int_at,
    judged,
    lay_out,
)  # fmt: skip
from warpline.kernels.cpu.panels import multiply_panels_of
from warpline.kernels.cpu.products import multiply_of
from warpline.kernels.cpu.quanta import rounded
from warpline.kernels.cpu.rescore import rescore_of
from warpline.kernels.cpu.sharing import claim, complete, part_of, wait
from warpline.kernels.cpu.sizes import COUNTS, LINE, PANEL, QUAD, TALL, apart, row_bytes
from warpline.kernels.cpu.words import Begin, Form, Stage, Word

_WORDS, _STAGE = len(Word), len(Stage)


_row_bytes, _apart = njit(**INNER)(row_bytes), njit(**INNER)(apart)


def program(stored: Any, cached: Any, activation: str, *, wide: bool) -> Callable[[int, Any], None]:
    """Return the decode function for weights and a cache of numpy's types `stored` and `cached`. `wide`: the CPU has
    64-byte vectors."""
    activated, cell, attend = ACTIVATIONS[activation], np.dtype(cached).itemsize, attend_of(cached, wide)
    multiply_codes, all_codes = multiply_panels_of(np.int8, wide), stored is np.int8
    plain = np.float32 if all_codes else stored  # unused with codes
    multiply_panels, multiply, rescore = multiply_panels_of(plain, wide), multiply_of(plain), rescore_of(plain)

    @njit(**INNER)
    def embed_row(at: np.ndarray, row: int) -> None:
        width, vocab, slot = at[Word.WIDTH.value], at[Word.VOCAB.value], int_at(at[Word.SEQUENCES.value], row)
        positions = array(at[Word.POSITIONS.value], INT64, at[Word.ROWS.value])
        if at[Word.BEGIN.value] == Begin.NEWEST.value and at[Word.DRAFTS.value] == 0:
            positions[row] = int_at(at[Word.LENGTH.value], slot) - 1
        position = positions[row]
        token = matrix(at[Word.TOKENS.value], INT64, at[Word.SLOTS.value], at[Word.CAPACITY.value])[slot, position]
        scale = np.float32(1)
        if at[Word.EMBEDDING_SCALES.value] != 0:
            scale = float_at(at[Word.EMBEDDING_SCALES.value], token)
        place = array(at[Word.POSITION_EMBEDDING.value], FLOAT32, (position + 1) * width)[
            position * width : position * width + width
        ]
        x = matrix(at[Word.X.value], FLOAT32, at[Word.ROWS.value], width)[row]
        if all_codes:  # in panels
            columns = (width + QUAD - 1) // QUAD * QUAD
            panels = array(at[Word.EMBEDDING.value], stored, (vocab + PANEL - 1) // PANEL * PANEL * columns)
            first = token // PANEL * PANEL * columns + token % PANEL * QUAD
            for i in range(width):
                x[i] = load(panels[first + i // QUAD * PANEL * QUAD + i % QUAD]) * scale + place[i]
        else:
            here = array(at[Word.EMBEDDING.value], stored, vocab * width)[token * width : token * width + width]
            for i in range(width):
                x[i] = load(here[i]) + place[i]

    @njit(**INNER)
    def embed(at: np.ndarray, lane: int) -> None:
        firsts = array(at[Word.FIRSTS.value], INT64, at[Word.LANES.value] + 1)
        for row in range(firsts[lane], firsts[lane + 1]):
            embed_row(at, row)

    @njit(**INNER)
    def multiplies_codes(at: np.ndarray, stage: np.ndarray) -> bool:
        return all_codes or (at[Word.SCREENS.value] != 0 and stage[Stage.CODES.value] != 0)

    @njit(**INNER)
    def is_in_rows(at: np.ndarray, stage: np.ndarray) -> bool:
        """Whether the matrix is read row by row, not in panels."""
        return stage[Stage.IN_ROWS.value] != 0 and not multiplies_codes(at, stage)

    @njit(**INNER)
    def cut(at: np.ndarray, stage: np.ndarray) -> tuple[int, int]:
        """Return into how many pieces a product's outputs are divided, and each of these by rows. With many rows pieces
        may be small; what matters is that no thread waits long for the last one."""
        pieces, preparing = stage[Stage.PIECES.value], at[Word.PREPARING.value]
        if preparing == 0 or is_in_rows(at, stage):
            return pieces, 1
        units = (stage[Stage.OUTPUTS.value] + PANEL - 1) // PANEL
        return min(units, 4 * preparing), max(1, 2 * preparing // units)

    @njit(**INNER)
    def product(at: np.ndarray, stage: np.ndarray, piece: int, x: int, x_apart: int, room: int) -> None:
        """Compute a piece of a stage's product for rows of x (quanta, if codes are multiplied) that are `x_apart` bytes
        apart."""
        outputs, inputs, rows = stage[Stage.OUTPUTS.value], stage[Stage.INPUTS.value], at[Word.ROWS.value]
        form, biases, target = stage[Stage.FORM.value], stage[Stage.BIAS.value], stage[Stage.TARGET.value]
        units = outputs if is_in_rows(at, stage) else (outputs + PANEL - 1) // PANEL
        adds, apart = form == Form.ADDED.value, 4 * stage[Stage.TARGET_APART.value]
        pieces, cuts = cut(at, stage)
        part = piece // cuts if cuts > 1 else part_of(piece, pieces, at[Word.THREADS.value])
        first, last = units * part // pieces, units * (part + 1) // pieces
        if cuts > 1:
            begin = min(rows, (rows * (piece % cuts) // cuts + TALL - 1) // TALL * TALL)
            end = min(rows, (rows * (piece % cuts + 1) // cuts + TALL - 1) // TALL * TALL)
            x, target, rows = x + begin * x_apart, target + begin * apart, end - begin
        if multiplies_codes(at, stage):
            codes, scales = stage[Stage.MATRIX.value], stage[Stage.SCALES.value]
            if not all_codes:
                codes, scales = stage[Stage.CODES.value], stage[Stage.CODE_SCALES.value]
            multiply_codes(codes, scales, biases, x, x_apart, rows, inputs, target, apart, outputs, first, last, adds)
        elif is_in_rows(at, stage):
            y, bias = matrix(target, FLOAT32, rows, outputs), array(biases, FLOAT32, outputs if biases != 0 else 0)
            multiply(stage[Stage.MATRIX.value], bias, x, rows, inputs, y, first, last, adds, room)
        else:
            weights = stage[Stage.MATRIX.value]
            multiply_panels(weights, 0, biases, x, x_apart, rows, inputs, target, apart, outputs, first, last, adds)
        if form == Form.ACTIVATED.value:
            begin, count = first * PANEL, min(last * PANEL, outputs) - first * PANEL
            for r in range(rows):
                here = array(target + r * apart + 4 * begin, FLOAT32, count)
                for i in range(count):
                    here[i] = activated(here[i])

    @njit(**INNER)
    def attention(at: np.ndarray, stage: np.ndarray, piece: int, room: int) -> None:
        """Compute one head of a lane: store its keys and values, or attend, or both for newest tokens. Consecutive
        pieces have the same head, whose keys and values stay in the cache."""
        heads, width, capacity = at[Word.HEADS.value], at[Word.WIDTH.value], at[Word.CAPACITY.value]
        depth, newest, rows = width // heads, at[Word.BEGIN.value] == Begin.NEWEST.value, at[Word.ROWS.value]
        head, lane = piece // at[Word.LANES.value], piece % at[Word.LANES.value]
        firsts = array(at[Word.FIRSTS.value], INT64, at[Word.LANES.value] + 1)
        first, end, column = firsts[lane], firsts[lane + 1], head * depth
        if first == end:
            return
        begin = (int_at(at[Word.SEQUENCES.value], first) * heads + head) * capacity * depth * cell
        keys, values = stage[Stage.KEYS.value] + begin, stage[Stage.VALUES.value] + begin
        source, target = stage[Stage.SOURCE.value] + 4 * column, stage[Stage.TARGET.value] + 4 * column
        if stage[Stage.FORM.value] == Form.CACHED.value or newest:
            qkv = matrix(stage[Stage.SOURCE.value], FLOAT32, rows, 3 * width)
            kept = matrix(keys, cached, capacity, depth), matrix(values, cached, capacity, depth)
            for r in range(first, end):
                position = int_at(at[Word.POSITIONS.value], r)
                for d in range(depth):
                    store(kept[0][position], d, qkv[r, width + column + d])
                    store(kept[1][position], d, qkv[r, 2 * width + column + d])
        if stage[Stage.FORM.value] == Form.ATTENTION.value:
            scale = float_at(at[Word.SETTINGS.value], stage[Stage.SCALE.value])
            last, apart = int_at(at[Word.POSITIONS.value], first) + 1, stage[Stage.TARGET_APART.value]
            attend(
                source + 12 * first * width, 3 * width, end - first, keys, values, depth, last, at[Word.WINDOW.value],
                scale, target + 4 * first * apart, apart, capacity, room,
            )  # fmt: skip

    @njit(**INNER)
    def is_as_wanted(at: np.ndarray, stage: np.ndarray) -> bool:
        """Whether a product reads its rows of x directly: no LayerNorm before it, and no codes."""
        return stage[Stage.NORM.value] == 0 and not multiplies_codes(at, stage)

    @njit(**INNER)
    def size_of_row(at: np.ndarray, stage: np.ndarray) -> int:
        """Return the bytes from one prepared row to the next. An odd number of cache lines, so that rows do not compete
        for the same cache sets, unless the matrix is row by row itself."""
        inputs = stage[Stage.INPUTS.value]
        if multiplies_codes(at, stage):
            return _row_bytes(inputs)
        return 4 * (inputs if is_in_rows(at, stage) else _apart(inputs))

    @njit(**INNER)
    def prepare(at: np.ndarray, stage: np.ndarray, first: int, last: int, target: int, room: int) -> None:
        """Prepare rows of x for a product: LayerNorm if there is one, quanta for codes. `target` is the address of the
        first of all rows; at `room` there is memory for one row."""
        inputs, codes, each = stage[Stage.INPUTS.value], multiplies_codes(at, stage), size_of_row(at, stage)
        count = inputs if stage[Stage.NORM.value] != 0 else 0
        weight, bias = (
            array(stage[Stage.NORM.value], FLOAT32, count),
            array(stage[Stage.NORM_BIAS.value], FLOAT32, count),
        )
        for r in range(first, last):
            x = array(stage[Stage.SOURCE.value] + 4 * r * stage[Stage.SOURCE_APART.value], FLOAT32, inputs)
            y = array(room if codes else target + r * each, FLOAT32, inputs)
            if count > 0:
                normalise(x, weight, bias, float_at(at[Word.SETTINGS.value], 0), y)
            if codes:
                rounded(y if count > 0 else x, target + r * each)

    @njit(**INNER)
    def prepare_together(at: np.ndarray, stage: np.ndarray, base: int, private: int) -> None:
        """Prepare every row once, for all threads."""
        pieces = at[Word.PREPARING.value]
        piece = claim(at, base + pieces)
        while piece >= 0:
            rows, number = at[Word.ROWS.value], piece - base
            first, last = rows * number // pieces, rows * (number + 1) // pieces
            prepare(at, stage, first, last, at[Word.PREPARED.value], private)
            complete(at, base + pieces)
            piece = claim(at, base + pieces)
        wait(at, base + pieces)

    @njit(**INNER)
    def prepared(at: np.ndarray, stage: np.ndarray, room: int) -> tuple[int, int, int]:
        """Return the address of the prepared rows of x, the bytes from one to the next, and the address of free memory.
        The rows are prepared here unless they were prepared together."""
        if is_as_wanted(at, stage):
            return stage[Stage.SOURCE.value], 4 * stage[Stage.SOURCE_APART.value], room
        rows, each = at[Word.ROWS.value], size_of_row(at, stage)
        if at[Word.PREPARING.value] > 0:
            return at[Word.PREPARED.value], each, room
        end = room + (rows * each + LINE - 1) // LINE * LINE
        prepare(at, stage, 0, rows, room, end)
        return room, each, end

    @njit(**INNER)
    def note(at: np.ndarray, me: int) -> None:
        """Store this thread's clock, if a profile is wanted. The first word of its memory counts the moments."""
        if at[Word.CLOCKS.value] != 0:
            count = at[Word.MOMENTS.value]
            # The count comes first; the two words at the end are the clock's scratch.
            room = array(at[Word.CLOCKS.value] + 8 * me * (count + 3), INT64, count + 3)
            if room[0] < count:
                room[1 + room[0]] = clock(at[Word.CLOCKS.value] + 8 * (me * (count + 3) + count + 1))
                room[0] += 1

    @njit(**INNER)
    def staged(at: np.ndarray, stage: np.ndarray, base: int, end: int, private: int, me: int) -> None:
        """Run the pieces of a stage that no other thread takes, and wait until the stage has ended."""
        x, x_apart, room, is_ready = 0, 0, private, False
        piece = claim(at, end)
        while piece >= 0:
            if stage[Stage.FORM.value] >= Form.CACHED.value:
                attention(at, stage, piece - base, private)
            else:
                if not is_ready:  # a thread without a piece cannot know which pass this is
                    x, x_apart, room = prepared(at, stage, private)
                    is_ready = True
                product(at, stage, piece - base, x, x_apart, room)
            complete(at, end)
            piece = claim(at, end)
        note(at, me)
        wait(at, end)
        note(at, me)

    @njit(**INNER)
    def sample_next(at: np.ndarray, head: np.ndarray, lane: int, step: int, private: int) -> None:
        """End a lane's step: a token for its newest row, and for each row after a draft that was right."""
        slots, drafts = at[Word.SLOTS.value], at[Word.DRAFTS.value]
        slot, firsts = (
            int_at(at[Word.LANE_SLOTS.value], lane),
            array(at[Word.FIRSTS.value], INT64, at[Word.LANES.value] + 1),
        )
        done, first = array(at[Word.DONE.value], FLAG, slots), firsts[lane]
        if done[slot] != 0:
            return
        tokens = matrix(at[Word.TOKENS.value], INT64, slots, at[Word.CAPACITY.value])[slot]
        kept = 0
        for row in range(first, firsts[lane + 1]):
            place = int_at(at[Word.LENGTH.value], slot)
            drafted = tokens[place]
            drawn = rescore(at, head, row, slot, private) if at[Word.SCREENS.value] != 0 else -1
            append(at, row, slot, step, drawn)
            if drafts == 0 or not judged(at, slot, row - first, place, drafted):
                break
            kept += 1
            if done[slot] != 0:
                break
        if drafts > 0:
            counted = matrix(at[Word.COUNTED.value], INT64, slots, COUNTS)[slot]
            counted[0] += 1
            counted[1] += firsts[lane + 1] - first - 1
            counted[2] += kept
            if done[slot] == 0:
                draft_next(at, slot)

    @njit(**INNER)
    def plan(at: np.ndarray) -> None:
        """Lay out the first pass of a call with drafts."""
        for lane in range(at[Word.LANES.value]):
            draft_next(at, int_at(at[Word.LANE_SLOTS.value], lane))
        lay_out(at)

    def decode(me: int, words: int) -> None:
        """Take up to STEPS steps of the lanes that are not done. Requires: every thread of the team calls it with its
        own number."""
        at = array(words, INT64, _WORDS)
        lanes, begin, drafts = at[Word.LANES.value], at[Word.BEGIN.value], at[Word.DRAFTS.value]
        private = at[Word.PRIVATE.value] + 4 * me * at[Word.PRIVATE_SIZE.value]
        stages = matrix(words + 8 * _WORDS, INT64, at[Word.STAGES.value], _STAGE)
        base, steps = 0, 0  # pieces before the stage; steps taken
        note(at, me)
        if drafts > 0:
            if claim(at, 1) == 0:
                plan(at)
                complete(at, 1)
            base = 1
            wait(at, base)
        for step in range(at[Word.STEPS.value]):
            if atomic_load(at[Word.STOP.value]) <= step:
                break
            if begin != Begin.READY.value:
                piece = claim(at, base + lanes)
                while piece >= 0:
                    embed(at, piece - base)
                    complete(at, base + lanes)
                    piece = claim(at, base + lanes)
                note(at, me)
                wait(at, base + lanes)
                note(at, me)
                base += lanes
            for stage_number in range(at[Word.FIRST.value], at[Word.LAST.value]):
                stage = stages[stage_number]
                if stage[Stage.FORM.value] == Form.CACHED.value and begin == Begin.NEWEST.value:
                    continue
                pieces = lanes * at[Word.HEADS.value]
                if stage[Stage.FORM.value] < Form.CACHED.value:
                    if at[Word.PREPARING.value] > 0 and not is_as_wanted(at, stage):
                        prepare_together(at, stage, base, private)
                        base += at[Word.PREPARING.value]
                    by_outputs, by_rows = cut(at, stage)
                    pieces = by_outputs * by_rows
                staged(at, stage, base, base + pieces, private, me)
                base += pieces
            steps = step + 1
            if at[Word.CHOOSES.value] != 0:
                piece = claim(at, base + lanes)
                while piece >= 0:
                    sample_next(at, stages[at[Word.LAST.value] - 1], piece - base, step, private)
                    if piece == base and atomic_load(at[Word.HALT.value]) != 0:  # one thread asks, so that all agree
                        array(at[Word.STOP.value], INT64, 1)[0] = step + 1
                    if drafts > 0 and add_fetch(at[Word.LEFT.value], -1) == 0:
                        lay_out(at)  # all lanes have their drafts; no thread continues before this piece has ended
                    complete(at, base + lanes)
                    piece = claim(at, base + lanes)
                note(at, me)
                wait(at, base + lanes)
                note(at, me)
                base += lanes
        if me == 0:
            at[Word.PASSES.value] = steps

    return decode
