"""The JSON of answers: events of a stream, and whole answers, for completions and for chats."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from warpline.serve.pieces import Table, quoted

#: What JSON has instead of minus infinity.
NEVER = -9999.0
DONE = b"data: [DONE]\n\n"
#: Names of answers need to be different, not secret.
_IDS = random.Random()

#: A token, its log-probability (None for the first of a text), and the likeliest at its place.
Scored = tuple[int, float | None, list[tuple[int, float]]]


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Tokens that were read and written."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def scored(token: int, found: tuple[float, Any, Any], count: int) -> Scored:
    """From what the engine notes of a token."""
    value, values, tokens = found
    top = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
    return token, max(value, NEVER), [(other, max(score, NEVER)) for other, score in top]


class Style(ABC):
    """How one kind of answer looks. One for each answer."""

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
        """All that stands before the text of an event."""
        return self._head + b'{"index":%d,' % index + (self.first_opening if first else self.opening)

    def ending(self, reason: str | None = None, logprobs: bytes = b"null", more: bytes = b"") -> bytes:
        """All that stands behind it."""
        said = b"null" if reason is None else b'"' + reason.encode() + b'"'
        return self.closing + b',"logprobs":' + logprobs + b',"finish_reason":' + said + more + b"}" + self._tail

    def last_event(self, more: dict[str, Any]) -> bytes:
        """The event behind all others, for what was asked for beside the choices."""
        return self._head + b"]," + msgspec.json.encode(more)[1:] + b"\n\n"

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, int], more: dict[str, Any]) -> bytes:
        """All at once."""
        shared = {"id": self.id, "object": self.whole, "created": self.created, "model": self.model}
        return msgspec.json.encode({**shared, "choices": choices, "usage": usage, **more})

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        """One of a whole answer's."""

    @abstractmethod
    def logprobs(self, table: Table, tokens: Iterable[Scored], offsets: list[int]) -> dict[str, Any]:
        """Of some tokens, which begin at these characters."""


class Completions(Style):
    """/v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"
    opening = first_opening = b'"text":"'
    closing = b'"'

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        """One of a whole answer's."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, table: Table, tokens: Iterable[Scored], offsets: list[int]) -> dict[str, Any]:
        """Lists side by side."""
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
    """/v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening = b'"delta":{"content":"'
    first_opening = b'"delta":{"role":"assistant","content":"'
    closing = b'"}'

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        """One of a whole answer's."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, table: Table, tokens: Iterable[Scored], offsets: list[int]) -> dict[str, Any]:
        """A list of objects."""

        def one(token: int, value: float | None) -> dict[str, Any]:
            return {"token": table.name(token), "logprob": value, "bytes": table.bytes_of(token)}

        content = [{**one(t, value), "top_logprobs": [one(*other) for other in top]} for t, value, top in tokens]
        return {"content": content, "refusal": None}
