"""The host's side of one row: ids become text, stop texts end it, and the result is a `Completion`."""

from __future__ import annotations

from dataclasses import dataclass

from warpline.engine.state import Request
from warpline.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token's log-probability under the model, and the likeliest tokens at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """What the batch of a completion took; shared by all completions that were generated together."""

    prefill_seconds: float
    decode_seconds: float
    #: Steps after the first token, and the bytes of weights and KV cache they had to move.
    decode_steps: int
    decode_bytes: int

    @property
    def seconds(self) -> float:
        """Prompt to last token."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def gb_per_second(self) -> float | None:
        """Bandwidth of the decode steps; None if there were none."""
        return self.decode_bytes / self.decode_seconds / 1e9 if self.decode_seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One generated text."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    #: "stop" (end of text or a stop text) or "length".
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None
    seed: int
    #: Which of the prompt's n completions this is.
    index: int
    timings: Timings


def total(completions: list[Completion]) -> Timings:
    """The timings of completions that may have run in several turns."""
    turns = {id(completion.timings): completion.timings for completion in completions}.values()
    return Timings(
        prefill_seconds=sum(turn.prefill_seconds for turn in turns),
        decode_seconds=sum(turn.decode_seconds for turn in turns),
        decode_steps=sum(turn.decode_steps for turn in turns),
        decode_bytes=sum(turn.decode_bytes for turn in turns),
    )


class Sequence:
    """A row while it grows."""

    def __init__(self, prompt: str, request: Request, tokenizer: Tokenizer, eos: int | None):
        self.prompt, self.request = prompt, request
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder = tokenizer.stream()
        self._eos = None if request.params.ignore_eos else eos
        self._released = 0  # characters of text already handed out
        self._searchable = 0  # a stop text counts from this character on: what came before min_tokens is safe

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt) + len(self.ids)

    def push(self, token: int) -> None:
        """Take in the next token, unless the row has ended."""
        if self.finish_reason is not None:
            return
        params = self.request.params
        self.ids.append(token)
        if token == self._eos:
            self._finish("stop")
            return
        self.text += self._decoder.push(token)
        if len(self.ids) < params.min_tokens:
            self._searchable = len(self.text)
        elif (cut := self._find_stop()) is not None:
            self.text = self.text[:cut]
            self.finish_reason = "stop"
            return
        if self.length >= self.request.limit:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.text += self._decoder.flush()

    def _find_stop(self) -> int | None:
        found = [self.text.find(stop, self._searchable) for stop in self.request.params.stops]
        return min((place for place in found if place >= 0), default=None)

    def release(self) -> str:
        """Text not handed out before; a tail that may become a stop text is kept back until it is clear."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= max((_overlap(self.text, stop) for stop in self.request.params.stops), default=0)
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece

    def completion(self, timings: Timings) -> Completion:
        """The finished result."""
        assert self.finish_reason is not None
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=tuple(self.request.prompt),
            text=self.text,
            token_ids=tuple(self.ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs) if self.request.params.logprobs is not None else None,
            seed=self.request.seed,
            index=self.request.sample,
            timings=timings,
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` could begin."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
