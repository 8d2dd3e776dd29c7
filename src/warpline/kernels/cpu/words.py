"""The interface between the executor and the team: 64-bit words, numbers and addresses, at fixed indices.

There is one table of stages for all calls; a call gives the first and the last stage to run.
"""

from __future__ import annotations

from enum import IntEnum, auto


class _Indices(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Word(_Indices):
    """The words of a call: numbers, then addresses."""

    STEPS = auto()
    SCREENS = auto()  # only logits that can decide the next token are computed
    CHOOSES = auto()  # a step ends with a token for every row; otherwise with the output of its last stage
    BEGIN = auto()  # a `Begin`
    FIRST = auto()  # first stage of a step
    LAST = auto()  # stage after the last one
    LANES = auto()  # sequences, or groups of given tokens that attend together
    ROWS = auto()  # tokens run together; with drafts, different ones in every pass
    DRAFTS = auto()  # most drafts of a sequence in a pass; 0 without drafts
    TOPS = auto()  # number of likeliest tokens per position in `TOP_TOKEN`
    PREPARING = auto()  # pieces in which rows of x are prepared for a product; 0 if every thread prepares them itself
    PASSES = auto()  # steps taken, set when a call ends
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
    FIRSTS = auto()  # first row of each lane, and then the number of rows
    SEQUENCES = auto()  # the slot of each row
    POSITIONS = auto()
    # of drafts (draft.py)
    PRICE = auto()  # cost of one more row, as a share of a pass
    CHANCES = auto()  # of drafts of each kind being right, per slot
    GUESSES = auto()  # last drafts, per slot
    COUNTED = auto()  # counts of drafts, per slot
    TABLE = auto()  # or 0
    TABLE_SIZE = auto()
    # of memory between stages
    X = auto()
    LOGITS = auto()
    NOISY = auto()
    MARKS = auto()
    RAW = auto()  # logits before penalties, biases and temperature
    PREPARED = auto()  # rows of x
    THREADS = auto()  # number of threads of the team
    PRIVATE = auto()  # private memory of each thread
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
    LOGPROB = auto()  # or 0 if no slot wants them
    TOP_LOGPROB = auto()
    TOP_TOKEN = auto()
    # of a profile, or 0: clocks of each thread, in order of time, and how many there is room for per thread
    CLOCKS = auto()
    MOMENTS = auto()
    # of words that the threads share
    NEXT = auto()  # first piece that is not taken
    ENDED = auto()  # pieces that have ended
    ASLEEP = auto()  # threads
    GOING = auto()  # lanes that are not done
    LEFT = auto()  # lanes whose step has not ended
    STOP = auto()  # first step that is not taken any more
    HALT = auto()  # whether the call should end after the current step


#: Words of a slot's record, named like the fields of `Slots`.
RECORD = tuple(word for word in Word if Word.TOKENS <= word <= Word.NOT_FINITE)
SHARED = (Word.NEXT, Word.ENDED, Word.ASLEEP, Word.GOING, Word.LEFT, Word.STOP, Word.HALT)


#: Names of the stages of a call in a profile: those of a layer in their order, and those before and after the layers.
EMBEDDING_STAGE = "embedding: embeddings looked up"
LAYER_STAGES = (
    "qkv: normalised, multiplied",
    "cache: keys and values stored",
    "attention: computed",
    "out: multiplied",
    "fc: normalised, multiplied",
    "proj: multiplied",
)
HEAD_STAGE, TOKEN_STAGE = "head: normalised, multiplied", "token: sampled"
#: A thread writes its clock at the end of its own work on a stage, and when all threads have finished it.
AWAITED = "{}: others awaited"


class Begin(_Indices):
    """What the rows of a call are."""

    NEWEST = auto()  # the newest token of each slot, and drafts after it
    GIVEN = auto()  # tokens at given positions, several of a slot among them
    READY = auto()  # the output of earlier stages


class Stage(_Indices):
    """The words of each stage, which follow those of the call: of a product its matrix and parameters, of attention its
    part of the cache."""

    FORM = auto()
    PIECES = auto()
    SOURCE = auto()
    SOURCE_APART = auto()  # floats from row to row
    TARGET = auto()
    TARGET_APART = auto()
    # of a product
    MATRIX = auto()  # in panels (panels.py),
    IN_ROWS = auto()  # or row by row (an LM head in floating point)
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
    SCALE = auto()  # its index in the settings


class Form(_Indices):
    """What a stage does with its product; or that it stores the keys and values of given tokens; or attention, which
    also stores those of newest tokens."""

    STORED = auto()
    ADDED = auto()
    ACTIVATED = auto()
    CACHED = auto()
    ATTENTION = auto()
