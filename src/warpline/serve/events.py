"""The JSON of answers: events of a stream and whole answers, for completions and for chats."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from warpline.serve.pieces import Table, quoted

#: The value that stands for minus infinity, which JSON lacks.
NEVER = -9999.0
DONE = b"data: [DONE]\n\n"
#: Ids of answers must be different, not secret.
_IDS = random.Random()

#: A token, its log-probability (None for the first of a text), and the likeliest tokens at its place.
Scored = tuple[int, float | None, list[tuple[int, float]]]


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Return the usage object: tokens read and tokens written."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def scored(token: int, found: tuple[float, Any, Any], count: int) -> Scored:
    """Convert the engine's log-probabilities of a token, with the `count` likeliest."""
    value, values, tokens = found
    top = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
    return token, max(value, NEVER), [(other, max(score, NEVER)) for other, score in top]


class Style(ABC):
    """The JSON form of one kind of answer; one object for each answer."""

    prefix: str
    whole: str
    chunk: str
    opening: bytes
    first_opening: bytes
    closing: bytes

    def __init__(self, model: str, *, usage: bool = False):
        self.id = f"{self.prefix}-{_IDS.getrandbits(96):024x}"
        self.created, self.model = int(time.time()), model
        shared = f'"id":"{self.id}","object":"{self.chunk}","created":{self.created},"model":"'
        self._head = b"data: {" + shared.encode() + quoted(model) + b'","choices":['
        self._tail = b"]" + (b',"usage":null' if usage else b"") + b"}\n\n"

    def opening_of(self, index: int, *, first: bool) -> bytes:
        """Return everything before the text of an event."""
        return self._head + b'{"index":%d,' % index + (self.first_opening if first else self.opening)

    def ending(self, reason: str | None = None, logprobs: bytes = b"null", more: bytes = b"") -> bytes:
        """Return everything after the text of an event."""
        said = b"null" if reason is None else b'"' + reason.encode() + b'"'
        return self.closing + b',"logprobs":' + logprobs + b',"finish_reason":' + said + more + b"}" + self._tail

    def last_event(self, more: dict[str, Any]) -> bytes:
        """Return the event after all others, with what was requested besides the choices."""
        return self._head + b"]," + msgspec.json.encode(more)[1:] + b"\n\n"

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, int], more: dict[str, Any]) -> bytes:
        """Return the whole answer."""
        shared = {"id": self.id, "object": self.whole, "created": self.created, "model": self.model}
        return msgspec.json.encode({**shared, "choices": choices, "usage": usage, **more})

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        """Return one choice of a whole answer."""

    @abstractmethod
    def logprobs(self, table: Table, tokens: Iterable[Scored], offsets: list[int]) -> dict[str, Any]:
        """Return the log-probabilities of tokens that begin at the characters `offsets`."""


class Completions(Style):
    """The form of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"
    opening = first_opening = b'"text":"'
    closing = b'"'

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, table: Table, tokens: Iterable[Scored], offsets: list[int]) -> dict[str, Any]:
        """Return the log-probabilities as parallel lists."""
        found = list(tokens)
        return {
            "text_offset": offsets,
            "token_logprobs": [value for _, value, _ in found],
            "tokens": [table.name(token) for token, _, _ in found],
            "top_logprobs": [
                None if value is None else {table.name(other): score for other, score in reversed(top)}
                for _, value, top in found
            ],
        }


class Chat(Style):
    """The form of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening = b'"delta":{"content":"'
    first_opening = b'"delta":{"role":"assistant","content":"'
    closing = b'"}'

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, table: Table, tokens: Iterable[Scored], offsets: list[int]) -> dict[str, Any]:
        """Return the log-probabilities as a list of objects."""

        def one(token: int, value: float | None) -> dict[str, Any]:
            return {"token": table.name(token), "logprob": value, "bytes": table.bytes_of(token)}

        content = [{**one(t, value), "top_logprobs": [one(*other) for other in top]} for t, value, top in tokens]
        return {"content": content, "refusal": None}
