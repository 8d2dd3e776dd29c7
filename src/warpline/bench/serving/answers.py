"""Reads a server's answers: when the first token came, the gaps between the others, and how many there were."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from warpline.bench.serving.client import Raw

#: HTTP status of an overloaded server.
TOO_MANY = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request as its client saw it; times in seconds."""

    prompt_tokens: int
    tokens: int
    #: Seconds to the first chunk with a token in it.
    ttft: float
    #: Seconds between chunks with tokens in them.
    gaps: tuple[float, ...]
    #: Seconds to the end of the answer.
    whole: float
    #: How `tokens` was counted: the server's usage, its token ids, or its chunks.
    counted: str

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, also right where a chunk holds many; None for one token."""
        return sum(self.gaps) / (self.tokens - 1) if self.tokens > 1 else None


def read(raw: Raw) -> Answer | str:
    """Parse the answer, or return the reason why there is none."""
    if raw.error is not None:
        return raw.error
    if raw.status != 200:
        return f"{raw.status}: {_message(b''.join(piece for _, piece in raw.pieces))}"
    times: list[float] = []
    usage: dict[str, Any] = {}
    ids = 0
    for when, event in _events(raw):
        try:
            found = json.loads(event)
        except ValueError:
            return f"an event is no JSON: {event[:80]!r}"
        if not isinstance(found, dict):
            return f"an event is no object: {event[:80]!r}"
        if found.get("error"):
            return f"in the stream: {_message(event)}"
        usage = found.get("usage") or usage
        choice: dict[str, Any] = next(iter(found.get("choices") or ()), {})
        some = choice.get("token_ids") or ()
        ids += len(some)
        if some or choice.get("text") or (choice.get("delta") or {}).get("content"):
            times.append(when)
    if not times:
        return "no text came"
    counts = (("usage", usage.get("completion_tokens")), ("token ids", ids), ("chunks", len(times)))
    counted, tokens = next((how, count) for how, count in counts if count)
    return Answer(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        tokens=tokens,
        ttft=times[0] - raw.sent,
        gaps=tuple(b - a for a, b in itertools.pairwise(times)),
        whole=raw.ended - raw.sent,
        counted=counted,
    )


def _events(raw: Raw) -> Iterator[tuple[float, bytes]]:
    """Yield each event's data, with the time at which its line was complete."""
    rest = b""
    for when, piece in raw.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if len(data) < len(line.strip()) and data != b"[DONE]":
                yield when, data


def _message(body: bytes) -> str:
    """Return the message of an error body, in OpenAI's form or in any other."""
    try:
        found = json.loads(body)
        error = found.get("error") or found.get("detail") or found
        text = error["message"] if isinstance(error, dict) and "message" in error else json.dumps(error)
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:200] or "no reason was given"
