"""Sizes of memory that compiled code and its callers agree on. Imports no numba: loading compiled code does not need
it.
"""

from __future__ import annotations

import numpy as np

from warpline.config import MOST_SPECULATIVE_TOKENS

# --- products ---------------------------------------------------------------------------------------------------------
#: Elements of a vector; CPUs with shorter vectors process it in parts.
LANES = 16
#: Bytes of a cache line.
LINE = 64
#: Outputs of a panel (panels.py), inputs that are interleaved in a panel of codes, rows of the largest block of
#: products.
PANEL, QUAD, TALL = 2 * LANES, 4, 12
#: Rows of the LM head that are converted at a time.
ROOM = 4
#: Most sums of a block of products with the head.
SUMS = 16
#: Bytes after a row of x in quanta, which begin with the quantum (quanta.py).
BEHIND_ROW = LINE


def apart(columns: int) -> int:
    """Return the floats from one row of x to the next: an odd number of cache lines, so that rows do not compete for
    the same cache sets."""
    return LANES * (-(-columns // LANES) | 1)


def row_bytes(inputs: int) -> int:
    """Return the bytes of a row of x in quanta, two bytes each, rounded up to an odd number of cache lines."""
    return LINE * (-(-2 * inputs // LINE) + 1 | 1)


# --- attention --------------------------------------------------------------------------------------------------------
#: Most consecutive tokens of a prompt that attend together, and those of them whose values are added at a time.
TOGETHER, GROUP = 48, 6


def attending(depth: int, capacity: int) -> int:
    """Return the floats of scratch for attention: rows of q, keys of one vector of positions, scores."""
    return LANES + TOGETHER * (depth + apart(capacity)) + LANES * depth


# --- drafts -----------------------------------------------------------------------------------------------------------
#: Tokens that are compared; longer matches count as this one.
MOST_MATCH = 6
#: Fewest and most tokens before an entry of the table, and classes of how often the entry was seen.
ORDERS, CLASSES = (2, 4), 3
#: Kinds of matches: by length in the text, then by order and class in the table.
KINDS = MOST_MATCH + (ORDERS[1] - ORDERS[0] + 1) * CLASSES
#: Initial probability that a draft of each kind is right, for a new sequence.
FIRST_CHANCES = np.array([0.1, 0.2, 0.35, 0.5, 0.6, 0.7] + [0.2, 0.35, 0.5] * 3, np.float32)
#: Words for a slot's last drafts: number of drafts run, first guess (-1 for none), kind of each.
GUESS = 2 + MOST_SPECULATIVE_TOKENS
#: Counts of a slot: passes, drafts run, drafts that were right.
COUNTS = 3
