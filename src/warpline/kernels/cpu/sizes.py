"""Sizes of memory that compiled code and those who give it memory agree on. No numba here: who loads compiled code
does without it.
"""

from __future__ import annotations

import numpy as np

from warpline.config import MOST_SPECULATIVE_TOKENS

# --- products ---------------------------------------------------------------------------------------------------------
#: Elements of a vector; narrower machines take it in parts.
LANES = 16
#: Bytes of a line of the cache.
LINE = 64
#: Rows of a matrix that are converted at a time.
ROOM = 4
#: Sums of a block of products, at most.
SUMS = 16
#: Codes of one byte that are multiplied at a time. Rows of x in quanta end with zeros up to a multiple of it.
STEP = 64
#: Behind the bytes of such a row: a sum for each lane, and its quantum (integers.py).
BEHIND_ROW = 128


def row_bytes(inputs: int) -> int:
    """Of a row of x in quanta, two bytes each."""
    return 2 * ((inputs + STEP - 1) // STEP * STEP) + BEHIND_ROW


# --- attention --------------------------------------------------------------------------------------------------------
#: Tokens of a prompt, one behind the other, that attend together.
GROUP = 6

# --- drafts -----------------------------------------------------------------------------------------------------------
#: Tokens that are compared; matches of this many and more are one kind.
MOST_MATCH = 6
#: Tokens before an entry of the table, at least and at most, and classes of how often the entry was seen.
ORDERS, CLASSES = (2, 4), 3
#: Kinds of matches: by length in the text, then by order and class in the table.
KINDS = MOST_MATCH + (ORDERS[1] - ORDERS[0] + 1) * CLASSES
#: How likely a kind is to be right, as long as nothing is known of a sequence.
FIRST_CHANCES = np.array([0.1, 0.2, 0.35, 0.5, 0.6, 0.7] + [0.2, 0.35, 0.5] * 3, np.float32)
#: What is known of a slot's last drafts: how many are run, the first guess (-1 if there is none), the kind of each.
GUESS = 2 + MOST_SPECULATIVE_TOKENS
#: What is counted of a slot: passes, drafts that were run, drafts that were right.
COUNTS = 3
