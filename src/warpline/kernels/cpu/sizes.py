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
#: Outputs of a panel (panels.py), inputs that lie together in a panel of codes, rows of the largest block of products.
PANEL, QUAD, TALL = 2 * LANES, 4, 12
#: Rows of the LM head that are converted at a time.
ROOM = 4
#: Sums of a block of products with the head, at most.
SUMS = 16
#: Behind a row of x in quanta: what a quantum is (quanta.py).
BEHIND_ROW = LINE


def apart(columns: int) -> int:
    """Floats from one row of x to the next: an odd number of lines, so that rows do not compete for the same places of
    a cache."""
    return LANES * (-(-columns // LANES) | 1)


def row_bytes(inputs: int) -> int:
    """Of a row of x in quanta, two bytes each, up to an odd number of lines."""
    return LINE * (-(-2 * inputs // LINE) + 1 | 1)


# --- attention --------------------------------------------------------------------------------------------------------
#: Tokens of a prompt, one behind the other, that attend together: at most, and of these at a time to values.
TOGETHER, GROUP = 48, 6


def attending(depth: int, capacity: int) -> int:
    """Floats that attention needs for itself: rows of q, keys of as many positions as a vector has lanes, scores."""
    return LANES + TOGETHER * (depth + apart(capacity)) + LANES * depth


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
