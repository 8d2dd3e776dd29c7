"""The end of a step, lane by lane: the next token, the update of the slot's record, and the next drafts.

A lane's rows are the newest token and the drafts after it. Each row's token is chosen as in a step of its own, from the
record as it is by then, and the next row counts if its draft is that token. So parameters that depend on earlier tokens
are exact, and a text is the same with drafts and without.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from warpline.kernels.cpu.draft import draft, learn, note
from warpline.kernels.cpu.intrinsics import INNER, Number, add_fetch, array, atomic_load, matrix
from warpline.kernels.cpu.sampling import log_probabilities, penalise, sample_token
from warpline.kernels.cpu.sizes import GUESS, KINDS
from warpline.kernels.cpu.words import Word

FLOAT32, INT64, FLAG = np.float32, np.int64, np.uint8


@njit(**INNER)
def float_at(address: int, i: int) -> Number:
    """Return element `i` of float32 values at an address."""
    return array(address, FLOAT32, i + 1)[i]


@njit(**INNER)
def int_at(address: int, i: int) -> int:
    """Return element `i` of int64 values at an address."""
    return array(address, INT64, i + 1)[i]


@njit(**INNER)
def banned_and_key(at: np.ndarray, slot: int) -> tuple[int, int]:
    """Return the token that must not come next, or -1, and the key of the next token's noise."""
    slots, capacity, place = at[Word.SLOTS.value], at[Word.CAPACITY.value], int_at(at[Word.LENGTH.value], slot)
    stops = array(at[Word.STOPS_AT_EOS.value], FLAG, slots)[slot] != 0
    banned = at[Word.EOS.value] if stops and place < int_at(at[Word.MIN_LENGTH.value], slot) else -1
    return banned, matrix(at[Word.NOISE.value], np.int32, slots, capacity)[slot, min(place, capacity - 1)]


@njit(**INNER)
def append(at: np.ndarray, row: int, slot: int, step: int, drawn: int) -> None:
    """End a row's step as `Slots` describes it. `drawn` is the token if it is decided already, or -1."""
    vocab, rows, capacity = at[Word.VOCAB.value], at[Word.ROWS.value], at[Word.CAPACITY.value]
    slots, eos = at[Word.SLOTS.value], at[Word.EOS.value]
    logits = matrix(at[Word.LOGITS.value], FLOAT32, rows, vocab)[row]
    noisy, marks = (
        matrix(at[Word.NOISY.value], FLOAT32, rows, vocab)[row],
        matrix(at[Word.MARKS.value], FLAG, rows, vocab)[row],
    )
    tokens = matrix(at[Word.TOKENS.value], INT64, slots, capacity)[slot]
    stops = array(at[Word.STOPS_AT_EOS.value], FLAG, slots)[slot] != 0
    place, finite = int_at(at[Word.LENGTH.value], slot), True
    for i in range(vocab):
        finite &= np.isfinite(logits[i])
    if not finite:
        array(at[Word.NOT_FINITE.value], FLAG, slots)[slot] = 1
    raw = matrix(at[Word.RAW.value], FLOAT32, rows, vocab)[row]
    wanted = at[Word.LOGPROB.value] != 0 and array(at[Word.WANTS.value], FLAG, slots)[slot] != 0
    if wanted:
        for i in range(vocab):
            raw[i] = logits[i]
    banned, key = banned_and_key(at, slot)
    temperature, top_k, penalty = (
        float_at(at[Word.TEMPERATURE.value], slot),
        int_at(at[Word.TOP_K.value], slot),
        float_at(at[Word.PENALTY.value], slot),
    )
    top_p, min_p = float_at(at[Word.TOP_P.value], slot), float_at(at[Word.MIN_P.value], slot)
    penalise(logits, tokens[:place], marks, penalty)
    biased = array(at[Word.BIASED.value], FLAG, slots)[slot] != 0
    bias = matrix(at[Word.BIAS.value], FLOAT32, slots, vocab)[slot]
    if biased:
        for i in range(vocab):
            logits[i] += bias[i]
    chosen = drawn
    if drawn < 0:
        chosen = sample_token(logits, noisy, banned, temperature, top_k, top_p, min_p, key, at[Word.SCREENS.value] != 0)
    if place >= int_at(at[Word.KNOWN.value], slot):
        tokens[place] = chosen
    array(at[Word.LENGTH.value], INT64, slots)[slot] = place + 1
    if wanted:
        note_logprobs(at, raw, slot, place, tokens[place])
    if biased:
        counts, token = matrix(at[Word.COUNTS.value], np.int32, slots, vocab)[slot], tokens[place]
        first = float_at(at[Word.PRESENCE.value], slot) if counts[token] == 0 else np.float32(0)
        bias[token] -= float_at(at[Word.FREQUENCY.value], slot) + first
        counts[token] += 1
    if (tokens[place] == eos and stops) or place + 1 >= int_at(at[Word.LIMIT.value], slot):
        array(at[Word.DONE.value], FLAG, slots)[slot] = 1
        if add_fetch(at[Word.GOING.value], -1) == 0:
            array(at[Word.STOP.value], INT64, 1)[0] = step + 1  # visible to all threads when this piece has ended


@njit(**INNER)
def note_logprobs(at: np.ndarray, raw: np.ndarray, slot: int, place: int, token: int) -> None:
    """Store the log-probabilities of the token at `place` and of the likeliest ones there."""
    top, capacity = at[Word.TOPS.value], at[Word.CAPACITY.value]
    first = (slot * capacity + place) * top
    values = array(at[Word.TOP_LOGPROB.value], FLOAT32, first + top)[first : first + top]
    tokens = array(at[Word.TOP_TOKEN.value], INT64, first + top)[first : first + top]
    off = log_probabilities(raw, values, tokens)
    matrix(at[Word.LOGPROB.value], FLOAT32, at[Word.SLOTS.value], capacity)[slot, place] = raw[token] - off


# --- drafts -----------------------------------------------------------------------------------------------------------


@njit(**INNER)
def draft_next(at: np.ndarray, slot: int) -> None:
    """Draft the tokens that run after the newest token of a slot in the next pass."""
    slots, capacity, length = at[Word.SLOTS.value], at[Word.CAPACITY.value], int_at(at[Word.LENGTH.value], slot)
    tokens = matrix(at[Word.TOKENS.value], INT64, slots, capacity)[slot]
    chances = matrix(at[Word.CHANCES.value], FLOAT32, slots, KINDS)[slot]
    guesses = matrix(at[Word.GUESSES.value], INT64, slots, GUESS)[slot]
    most = min(at[Word.DRAFTS.value], int_at(at[Word.LIMIT.value], slot) - 1 - length)
    # With n lanes, a pass with one more row takes 1 + price (n - 1), in units of one lane's pass, for n tokens.
    price, going = float_at(at[Word.PRICE.value], 0), np.float32(max(1, atomic_load(at[Word.GOING.value])))
    bar = price * going / (np.float32(1) + price * (going - np.float32(1)))
    table = array(at[Word.TABLE.value], INT64, at[Word.TABLE_SIZE.value])
    draft(tokens, length, most, int_at(at[Word.KNOWN.value], slot), bar, table, chances, guesses)


@njit(**INNER)
def judged(at: np.ndarray, slot: int, row: int, place: int, expected: int) -> bool:
    """Return whether the draft of a lane's row `row` equals the token that was chosen; learn from it."""
    slots, capacity = at[Word.SLOTS.value], at[Word.CAPACITY.value]
    tokens = matrix(at[Word.TOKENS.value], INT64, slots, capacity)[slot]
    guesses = matrix(at[Word.GUESSES.value], INT64, slots, GUESS)[slot]
    if place < int_at(at[Word.KNOWN.value], slot):
        return row < guesses[0]
    if at[Word.TABLE_SIZE.value] > 0:
        note(array(at[Word.TABLE.value], INT64, at[Word.TABLE_SIZE.value]), tokens, place)
    was_right = tokens[place] == expected
    if row < guesses[0] or (row == 0 and guesses[1] >= 0):
        if row == 0:
            was_right = tokens[place] == guesses[1]
        learn(matrix(at[Word.CHANCES.value], FLOAT32, slots, KINDS)[slot], guesses[2 + row], was_right)
    return row < guesses[0] and was_right


@njit(**INNER)
def lay_out(at: np.ndarray) -> None:
    """Lay out the rows of the next pass: the newest token and the drafts of each lane that is not done."""
    lanes, slots = at[Word.LANES.value], at[Word.SLOTS.value]
    firsts, lane_slots = array(at[Word.FIRSTS.value], INT64, lanes + 1), array(at[Word.LANE_SLOTS.value], INT64, lanes)
    done, row = array(at[Word.DONE.value], FLAG, slots), 0
    guesses = matrix(at[Word.GUESSES.value], INT64, slots, GUESS)
    for lane in range(lanes):
        slot, firsts[lane] = lane_slots[lane], row
        if done[slot] == 0:
            length, count = int_at(at[Word.LENGTH.value], slot), 1 + guesses[slot, 0]
            sequences = array(at[Word.SEQUENCES.value], INT64, row + count)
            positions = array(at[Word.POSITIONS.value], INT64, row + count)
            for i in range(count):
                sequences[row + i], positions[row + i] = slot, length - 1 + i
            row += count
    firsts[lanes] = row
    at[Word.ROWS.value] = row
    array(at[Word.LEFT.value], INT64, 1)[0] = lanes
