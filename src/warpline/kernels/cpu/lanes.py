"""The end of a step, lane by lane: which token follows, what the slot's record says then, and what is drafted next.

A lane's rows are the newest token and drafts behind it. Each row's token is chosen as it would be in a step of its own,
from the record as it is by then, and the next row counts if its draft is that token. So whatever a setting makes of the
tokens before is right, and a text is the same with drafts and without.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from warpline.kernels.cpu.choose import choose, log_probabilities, penalise
from warpline.kernels.cpu.draft import draft, learn, note
from warpline.kernels.cpu.intrinsics import INNER, Number, add_fetch, array, atomic_load, matrix
from warpline.kernels.cpu.sizes import GUESS, KINDS
from warpline.kernels.cpu.words import Word

SINGLE, WHOLE, FLAG = np.float32, np.int64, np.uint8


@njit(**INNER)
def number(address: int, i: int) -> Number:
    """One of several float32."""
    return array(address, SINGLE, i + 1)[i]


@njit(**INNER)
def whole(address: int, i: int) -> int:
    """One of several int64."""
    return array(address, WHOLE, i + 1)[i]


@njit(**INNER)
def banned_and_key(at: np.ndarray, slot: int) -> tuple[int, int]:
    """The token that must not come next, or -1, and the key of the next token's noise."""
    slots, capacity, place = at[Word.SLOTS.value], at[Word.CAPACITY.value], whole(at[Word.LENGTH.value], slot)
    stops = array(at[Word.STOPS_AT_EOS.value], FLAG, slots)[slot] != 0
    banned = at[Word.EOS.value] if stops and place < whole(at[Word.MIN_LENGTH.value], slot) else -1
    return banned, matrix(at[Word.NOISE.value], np.int32, slots, capacity)[slot, min(place, capacity - 1)]


@njit(**INNER)
def append(at: np.ndarray, row: int, slot: int, step: int) -> None:
    """The end of a row's step, as `Slots` describes it."""
    vocab, rows, capacity = at[Word.VOCAB.value], at[Word.ROWS.value], at[Word.CAPACITY.value]
    slots, eos = at[Word.SLOTS.value], at[Word.EOS.value]
    logits = matrix(at[Word.LOGITS.value], SINGLE, rows, vocab)[row]
    noisy, marks = (
        matrix(at[Word.NOISY.value], SINGLE, rows, vocab)[row],
        matrix(at[Word.MARKS.value], FLAG, rows, vocab)[row],
    )
    tokens = matrix(at[Word.TOKENS.value], WHOLE, slots, capacity)[slot]
    stops = array(at[Word.STOPS_AT_EOS.value], FLAG, slots)[slot] != 0
    place, finite = whole(at[Word.LENGTH.value], slot), True
    for i in range(vocab):
        finite &= np.isfinite(logits[i])
    if not finite:
        array(at[Word.NOT_FINITE.value], FLAG, slots)[slot] = 1
    raw = matrix(at[Word.RAW.value], SINGLE, rows, vocab)[row]
    wanted = at[Word.LOGPROB.value] != 0 and array(at[Word.WANTS.value], FLAG, slots)[slot] != 0
    if wanted:
        for i in range(vocab):
            raw[i] = logits[i]
    banned, key = banned_and_key(at, slot)
    temperature, top_k, penalty = (
        number(at[Word.TEMPERATURE.value], slot),
        whole(at[Word.TOP_K.value], slot),
        number(at[Word.PENALTY.value], slot),
    )
    top_p, min_p = number(at[Word.TOP_P.value], slot), number(at[Word.MIN_P.value], slot)
    penalise(logits, tokens[:place], marks, penalty)
    biased = array(at[Word.BIASED.value], FLAG, slots)[slot] != 0
    bias = matrix(at[Word.BIAS.value], SINGLE, slots, vocab)[slot]
    if biased:
        for i in range(vocab):
            logits[i] += bias[i]
    chosen = choose(logits, noisy, banned, temperature, top_k, top_p, min_p, key, at[Word.SCREENS.value] != 0)
    if place >= whole(at[Word.KNOWN.value], slot):
        tokens[place] = chosen
    array(at[Word.LENGTH.value], WHOLE, slots)[slot] = place + 1
    if wanted:
        note_logprobs(at, raw, slot, place, tokens[place])
    if biased:
        counts, token = matrix(at[Word.COUNTS.value], np.int32, slots, vocab)[slot], tokens[place]
        first = number(at[Word.PRESENCE.value], slot) if counts[token] == 0 else np.float32(0)
        bias[token] -= number(at[Word.FREQUENCY.value], slot) + first
        counts[token] += 1
    if (tokens[place] == eos and stops) or place + 1 >= whole(at[Word.LIMIT.value], slot):
        array(at[Word.DONE.value], FLAG, slots)[slot] = 1
        if add_fetch(at[Word.GOING.value], -1) == 0:
            array(at[Word.STOP.value], WHOLE, 1)[0] = step + 1  # seen by all when this piece has ended


@njit(**INNER)
def note_logprobs(at: np.ndarray, raw: np.ndarray, slot: int, place: int, token: int) -> None:
    """Of the token at `place` and of the likeliest ones there."""
    top, capacity = at[Word.TOPS.value], at[Word.CAPACITY.value]
    first = (slot * capacity + place) * top
    values = array(at[Word.TOP_LOGPROB.value], SINGLE, first + top)[first : first + top]
    tokens = array(at[Word.TOP_TOKEN.value], WHOLE, first + top)[first : first + top]
    off = log_probabilities(raw, values, tokens)
    matrix(at[Word.LOGPROB.value], SINGLE, at[Word.SLOTS.value], capacity)[slot, place] = raw[token] - off


# --- drafts -----------------------------------------------------------------------------------------------------------


@njit(**INNER)
def draft_next(at: np.ndarray, slot: int) -> None:
    """What is run behind the newest token of a slot in the next pass."""
    slots, capacity, length = at[Word.SLOTS.value], at[Word.CAPACITY.value], whole(at[Word.LENGTH.value], slot)
    tokens = matrix(at[Word.TOKENS.value], WHOLE, slots, capacity)[slot]
    chances = matrix(at[Word.CHANCES.value], SINGLE, slots, KINDS)[slot]
    guesses = matrix(at[Word.GUESSES.value], WHOLE, slots, GUESS)[slot]
    most = min(at[Word.DRAFTS.value], whole(at[Word.LIMIT.value], slot) - 1 - length)
    # With n lanes a pass of rows beyond theirs takes 1 + price (n - 1), in units of one lane's, for n tokens.
    price, going = number(at[Word.PRICE.value], 0), np.float32(max(1, atomic_load(at[Word.GOING.value])))
    bar = price * going / (np.float32(1) + price * (going - np.float32(1)))
    table = array(at[Word.TABLE.value], WHOLE, at[Word.TABLE_SIZE.value])
    draft(tokens, length, most, whole(at[Word.KNOWN.value], slot), bar, table, chances, guesses)


@njit(**INNER)
def judged(at: np.ndarray, slot: int, row: int, place: int, expected: int) -> bool:
    """Whether the draft of a lane's row of this number is the token that has come; what that teaches."""
    slots, capacity = at[Word.SLOTS.value], at[Word.CAPACITY.value]
    tokens = matrix(at[Word.TOKENS.value], WHOLE, slots, capacity)[slot]
    guesses = matrix(at[Word.GUESSES.value], WHOLE, slots, GUESS)[slot]
    if place < whole(at[Word.KNOWN.value], slot):
        return row < guesses[0]
    if at[Word.TABLE_SIZE.value] > 0:
        note(array(at[Word.TABLE.value], WHOLE, at[Word.TABLE_SIZE.value]), tokens, place)
    was_right = tokens[place] == expected
    if row < guesses[0] or (row == 0 and guesses[1] >= 0):
        if row == 0:
            was_right = tokens[place] == guesses[1]
        learn(matrix(at[Word.CHANCES.value], SINGLE, slots, KINDS)[slot], guesses[2 + row], was_right)
    return row < guesses[0] and was_right


@njit(**INNER)
def lay_out(at: np.ndarray) -> None:
    """Rows of the next pass: of each lane that is not done the newest token and its drafts."""
    lanes, slots = at[Word.LANES.value], at[Word.SLOTS.value]
    firsts, lane_slots = array(at[Word.FIRSTS.value], WHOLE, lanes + 1), array(at[Word.LANE_SLOTS.value], WHOLE, lanes)
    done, row = array(at[Word.DONE.value], FLAG, slots), 0
    guesses = matrix(at[Word.GUESSES.value], WHOLE, slots, GUESS)
    for lane in range(lanes):
        slot, firsts[lane] = lane_slots[lane], row
        if done[slot] == 0:
            length, count = whole(at[Word.LENGTH.value], slot), 1 + guesses[slot, 0]
            sequences = array(at[Word.SEQUENCES.value], WHOLE, row + count)
            positions = array(at[Word.POSITIONS.value], WHOLE, row + count)
            for i in range(count):
                sequences[row + i], positions[row + i] = slot, length - 1 + i
            row += count
    firsts[lanes] = row
    at[Word.ROWS.value] = row
    array(at[Word.LEFT.value], WHOLE, 1)[0] = lanes
