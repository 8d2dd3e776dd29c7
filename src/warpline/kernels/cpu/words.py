"""How an executor tells a team what to do: words of 64 bits, numbers and addresses, read by their places.

There is one table of stages for everything; a call says at which of them it begins and where it ends.
"""

from __future__ import annotations

from enum import IntEnum, auto


class _Indices(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Word(_Indices):
    """What a call is told: numbers, then addresses."""

    STEPS = auto()
    SCREENS = auto()  # whether only logits are computed that can be the largest
    CHOOSES = auto()  # whether a step ends with a token for every row, or with what its last stage leaves
    BEGIN = auto()  # a `Begin`
    FIRST = auto()  # stage of a step
    LAST = auto()  # stage that is not run any more
    LANES = auto()  # sequences, or groups of given tokens that attend together
    ROWS = auto()  # tokens at once; of newest tokens with drafts behind them, other ones in every pass
    DRAFTS = auto()  # of a sequence in a pass, at most; 0 if none are made
    TOPS = auto()  # likeliest tokens that `TOP_TOKEN` has room for
    PREPARING = auto()  # pieces in which rows of x are prepared for a product; 0 if every thread does so for itself
    PASSES = auto()  # steps that were taken, when a call has ended
    SLOTS = auto()
    WIDTH = auto()
    HEADS = auto()
    VOCAB = auto()
    CAPACITY = auto()
    WINDOW = auto()  # or 0
    EOS = auto()
    STAGES = auto()
    PRIVATE_SIZE = auto()
    # of the model
    EMBEDDING = auto()
    EMBEDDING_SCALES = auto()  # or 0
    POSITION_EMBEDDING = auto()
    SETTINGS = auto()  # LayerNorm's epsilon, then the scale of each layer's attention
    # of lanes and rows
    LANE_SLOTS = auto()  # the slot of each lane,
    FIRSTS = auto()  # its first row, and behind the last lane the number of rows
    SEQUENCES = auto()  # the slot of each row
    POSITIONS = auto()
    # of drafts (draft.py)
    PRICE = auto()  # of a further row, as a share of a pass
    CHANCES = auto()  # that drafts of each kind are right, of each slot
    GUESSES = auto()  # what was drafted last, of each slot
    COUNTED = auto()  # what came of it, of each slot
    TABLE = auto()  # or 0
    TABLE_SIZE = auto()
    # of memory between stages
    X = auto()
    LOGITS = auto()
    NOISY = auto()
    MARKS = auto()
    RAW = auto()  # logits as they were
    PREPARED = auto()  # rows of x
    THREADS = auto()  # of the team
    PRIVATE = auto()  # of each thread
    # of the slots
    TOKENS = auto()
    LENGTH = auto()
    KNOWN = auto()
    LIMIT = auto()
    MIN_LENGTH = auto()
    TEMPERATURE = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    PENALTY = auto()
    PRESENCE = auto()
    FREQUENCY = auto()
    NOISE = auto()
    STOPS_AT_EOS = auto()
    BIASED = auto()
    BIAS = auto()
    COUNTS = auto()
    DONE = auto()
    NOT_FINITE = auto()
    # of log-probabilities
    WANTS = auto()  # whether a slot wants them
    LOGPROB = auto()  # or 0 if none does
    TOP_LOGPROB = auto()
    TOP_TOKEN = auto()
    # of a profile, or 0: clocks of each thread, a moment behind the other, and how many of each there is room for
    CLOCKS = auto()
    MOMENTS = auto()
    # of words that the threads share
    NEXT = auto()  # piece that is not taken yet
    ENDED = auto()  # pieces
    ASLEEP = auto()  # threads
    GOING = auto()  # lanes that are not done
    LEFT = auto()  # lanes whose step has not ended
    STOP = auto()  # step that is not taken any more
    HALT = auto()  # whether somebody wants the call to end behind the step that it is at


#: Words of a slot's record, under the names that `Slots` has for them.
RECORD = tuple(word for word in Word if Word.TOKENS <= word <= Word.NOT_FINITE)
SHARED = (Word.NEXT, Word.ENDED, Word.ASLEEP, Word.GOING, Word.LEFT, Word.STOP, Word.HALT)


def _moments(*stages: str) -> tuple[str, ...]:
    return tuple(moment for stage in stages for moment in (stage, f"{stage.partition(':')[0]}: others awaited"))


#: Moments of a step at which threads write their clocks: at its begin, of each layer, at its end.
FIRST_MOMENTS = _moments("embedding: embeddings looked up")
LAYER_MOMENTS = _moments(
    "qkv: normalised, multiplied",
    "attention: computed",
    "out: multiplied",
    "fc: normalised, multiplied",
    "proj: multiplied",
)
LAST_MOMENTS = _moments("head: normalised, multiplied", "token: sampled")


class Begin(_Indices):
    """What the rows of a call are."""

    NEWEST = auto()  # of each slot the newest token, wherever it stands, and drafts behind it
    GIVEN = auto()  # tokens at positions that are given, several of a slot among them
    READY = auto()  # what earlier stages have left


class Stage(_Indices):
    """What is told of each stage, behind those: of a product its matrix and what goes with it, of attention its part of
    the cache."""

    FORM = auto()
    PIECES = auto()
    SOURCE = auto()
    SOURCE_APART = auto()  # numbers from row to row
    TARGET = auto()
    TARGET_APART = auto()
    # of a product
    MATRIX = auto()  # in panels (panels.py),
    IN_ROWS = auto()  # or, of an LM head in floating point, row by row
    SCALES = auto()  # or 0; scales and biases are whole panels
    BIAS = auto()  # or 0
    INPUTS = auto()
    OUTPUTS = auto()
    NORM = auto()  # or 0: LayerNorm before the product
    NORM_BIAS = auto()
    # of the LM head, or 0: codes of its matrix and their bounds (model/screen.py)
    CODES = auto()
    CODE_SCALES = auto()
    ERRORS = auto()
    NORMS = auto()
    # of attention
    KEYS = auto()
    VALUES = auto()
    SCALE = auto()  # its place among the settings


class Form(_Indices):
    """What becomes of a product; or that a stage stores the keys and values of given tokens, or is attention, which
    first stores those of newest tokens."""

    STORED = auto()
    ADDED = auto()
    ACTIVATED = auto()
    CACHED = auto()
    ATTENTION = auto()
