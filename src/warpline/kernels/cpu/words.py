"""How an executor tells a team what to do: words of 64 bits, numbers and addresses, read by their places."""

from __future__ import annotations

from enum import IntEnum, auto


class _Places(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Word(_Places):
    """What a call is told: numbers, then addresses."""

    STEPS = auto()
    CHOOSES = auto()  # whether a step ends with a token, or with logits alone
    BATCH = auto()
    ROWS = auto()  # tokens at once: of every sequence the newest, or those that are GIVEN
    GIVEN = auto()
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
    PLACES = auto()
    SETTINGS = auto()  # LayerNorm's epsilon, then the scale of each layer's attention
    # of rows
    SEQUENCES = auto()
    POSITIONS = auto()
    # of memory between stages
    X = auto()
    LOGITS = auto()
    NOISY = auto()
    MARKS = auto()
    PRIVATE = auto()  # of each thread
    # of the state
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
    NOISE = auto()
    STOPS_AT_EOS = auto()
    DONE = auto()
    BROKEN = auto()
    # of words that the threads share
    NEXT = auto()  # piece that nobody has taken
    ENDED = auto()  # pieces
    ASLEEP = auto()  # threads
    GOING = auto()  # rows that are not done
    STOP = auto()  # step that is not taken any more


SHARED = (Word.NEXT, Word.ENDED, Word.ASLEEP, Word.GOING, Word.STOP)


class Stage(_Places):
    """What is told of each stage, behind those. Attention has keys for a matrix, values for scales, and the place of
    its scale among the settings for a bias."""

    FORM = auto()
    PIECES = auto()
    MATRIX = auto()
    SCALES = auto()  # or 0
    BIAS = auto()  # or 0
    SOURCE = auto()
    TARGET = auto()
    INPUTS = auto()
    OUTPUTS = auto()
    NORM = auto()  # or 0: LayerNorm before the product
    NORM_BIAS = auto()


class Form(_Places):
    """What becomes of a product, or that a stage stores keys and values, or is attention, which first stores those of
    newest tokens."""

    STORED = auto()
    ADDED = auto()
    ACTIVATED = auto()
    KEYS = auto()
    ATTENTION = auto()
