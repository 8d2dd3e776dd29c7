"""Decodes token ids to text, chunk by chunk if a reader follows or a stop text may come, else all at once; and
`Completion`, the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from warpline.config import ModelConfig
from warpline.model import cost
from warpline.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from warpline.engine.job import Job

#: Number of texts from which on joining their bytes together is faster than one by one.
FEW_TEXTS = 4


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token's log-probability, and the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Timings:
    """Time and counts of a call, shared by all of its completions. Launches count with all of their sequences, those of
    other calls included."""

    config: ModelConfig
    dtype: str
    kv_dtype: str | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    #: Steps after the first token: passes over the weights.
    decode_steps: int = 0
    #: Sequences per step, summed over the steps; draft tokens that were run with them, and how many were right.
    lane_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    #: For each launch: the sequences' lengths before it, its steps, and whether codes of the LM head were enough.
    moved: list[tuple[list[int], int, bool]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def decode_bytes(self) -> int:
        """Bytes of weights and KV cache that the steps had to move."""
        return sum(
            cost.decode_bytes(
                self.config, self.dtype, lengths=lengths, steps=steps, screened=screened, kv_dtype=self.kv_dtype
            )
            for lengths, steps, screened in self.moved
        )

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens per sequence and step, 1 without drafts; None if there were no steps."""
        return 1 + self.accepted / self.lane_steps if self.lane_steps else None

    @property
    def gb_per_second(self) -> float | None:
        """Bandwidth of the decode steps; None if there were none."""
        return self.decode_bytes / self.decode_seconds / 1e9 if self.decode_seconds else None


@dataclass(kw_only=True, eq=False)
class Completion:
    """One generated text. The prompt's text and tokens are made when they are first read.

    Args:
        text: The new text, without the prompt.
        token_ids: The new tokens.
        logprobs: One for each token, if `SamplingParams.logprobs` asked for them.
        seed: The seed with which the same text is generated again.
        timings: Seconds and counts of the call.

    Examples:
        >>> from warpline import LLM, SamplingParams
        >>> llm = LLM("stories", device="cpu", dtype="fp32")
        >>> (completion,) = llm.generate("The sun was", SamplingParams(max_tokens=3, temperature=0, logprobs=1))
        >>> completion.prompt + completion.text
        'The sun was shining brightly.'
        >>> completion.finish_reason, len(completion.token_ids)
        ('length', 3)
        >>> completion.logprobs[0].token_id == completion.token_ids[0] == completion.logprobs[0].top[0][0]
        True
        >>> completion.timings.decode_steps
        2
    """

    text: str
    token_ids: tuple[int, ...]
    #: "stop" (end of text or a stop text), "length" or "cancelled".
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    seed: int
    #: Which of the prompt's n completions this is.
    index: int
    timings: Timings = field(repr=False)
    given: str | None = field(repr=False)  # the prompt's text; None if token ids were given
    given_ids: np.ndarray = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)

    @cached_property
    def prompt(self) -> str:
        """The prompt's text."""
        return self.tokenizer.decode(self.given_ids.tolist(), special=True) if self.given is None else self.given

    @cached_property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(self.given_ids.tolist())


class Texts:
    """The texts of sequences without a reader, decoded together. Tokens are appended to the lists `arrays`, and removed
    when they are decoded."""

    def __init__(self, tokenizer: Tokenizer, count: int):
        self._tokenizer = tokenizer
        self.arrays: list[list[np.ndarray]] = [[] for _ in range(count)]
        self._pieces: list[list[bytes]] = [[] for _ in range(count)]
        self._together = count >= FEW_TEXTS and tokenizer.on_bytes

    def extend(self) -> None:
        """Decode the tokens that have come since, if that is faster than decoding all at the end."""
        if not self._together:
            return
        new = [i for i, arrays in enumerate(self.arrays) if arrays]
        found = self._tokenizer.join_many([_taken(self.arrays[i]) for i in new]) if new else []
        for i, piece in zip(new, found, strict=True):
            self._pieces[i].append(piece)

    def finish(self) -> list[str]:
        """Return all texts."""
        if not self._together:
            return [self._tokenizer.decode(_taken(arrays).tolist()) for arrays in self.arrays]
        self.extend()
        return [b"".join(pieces).decode("utf-8", errors="replace") for pieces in self._pieces]


def _taken(arrays: list[np.ndarray]) -> np.ndarray:
    whole = arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, np.int64), *arrays])
    arrays.clear()
    return whole


class Text:
    """The text of a sequence while it grows."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int):
        self.text = ""
        self._tokenizer, self._stops, self._min_tokens = tokenizer, stops, min_tokens
        self._decoder = tokenizer.stream()
        self._ids: list[int] = []
        self._searchable = 0  # stop texts count from this character on; what came before min_tokens may contain them
        self._released = 0  # characters already handed out
        self._longest = max(map(len, stops), default=0)
        self.cut = False  # whether a stop text has ended it

    def extend(self, ids: Sequence[int]) -> int | None:
        """Append the next tokens. If they complete a stop text, the text ends before it, and the number of tokens up to
        the one that completed it is returned; else None."""
        if not self._stops:
            self.text += self._decoder.extend(ids)
            return None
        text = self.text  # a local copy: readers must not see a stop text
        safe = max(0, min(len(ids), self._min_tokens - 1 - len(self._ids)))
        if safe:
            text += self._decoder.extend(ids[:safe])
            self._searchable = len(text)
        begin = max(self._searchable, len(text) - self._longest + 1)
        text += self._decoder.extend(ids[safe:])
        self._ids += ids
        if any(text.find(stop, begin) >= 0 for stop in self._stops):
            return self._cut()
        self.text = text
        return None

    def _cut(self) -> int:
        """Decode token by token from the beginning, to find the token that completed the stop text."""
        decoder, text = self._tokenizer.stream(), ""
        for count, token in enumerate(self._ids, 1):
            text += decoder.push(token)
            if count >= self._min_tokens:
                found = [place for stop in self._stops if (place := text.find(stop, self._searchable)) >= 0]
                if found:
                    self.text, self.cut = text[: min(found)], True
                    return count
        raise AssertionError("a stop text that was found is gone")

    def finish(self) -> str:
        """Return the whole text; no more tokens come, and an incomplete character becomes U+FFFD."""
        if not self.cut:
            self.text += self._decoder.flush()
        return self.text

    @property
    def has_more(self) -> bool:
        """Whether there is text that was not handed out."""
        return self._clear_end() > self._released

    def _clear_end(self) -> int:
        return len(self.text) - max((_overlap(self.text, stop) for stop in self._stops), default=0)

    def release(self, *, ended: bool) -> str:
        """Return text not handed out before. A tail that may become a stop text is held back until it is decided."""
        end = len(self.text) if ended else self._clear_end()
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece


def watched(job: Job, tokenizer: Tokenizer, eos: int | None) -> Text:
    """Make a job's text as its tokens come, and end it at a stop text."""
    params = job.request.params
    text = Text(tokenizer, params.stops, params.min_tokens)
    last = None if params.ignore_eos else eos

    def receive(tokens: list[int]) -> int | None:
        return text.extend(tokens[:-1] if tokens[-1] == last else tokens)

    job.receive, job.followed = receive, True
    return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
