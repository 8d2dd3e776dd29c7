"""Turns tokens into the text of events as JSON: by a table for plain text, otherwise with a decoder."""

from __future__ import annotations

import codecs
from typing import NamedTuple, Protocol

import msgspec

from warpline.engine.text import Text
from warpline.model.tokenizer import Tokenizer

_encode = msgspec.json.encode


def quoted(text: str) -> bytes:
    """Return the text as a JSON string, without the quotation marks."""
    return _encode(text)[1:-1]


class Table:
    """Every token's text as JSON, made once; None for a token that is not whole characters."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self.tokenizer = tokenizer
        self.escaped: list[bytes | None] = []
        self.longest = 1  # most characters of a token
        for token in range(vocab):
            try:
                raw = tokenizer.joined_bytes([token])  # empty for a special token; it may exceed the tokenizer's
                self.longest = max(self.longest, 64 if raw is None else len(raw))
                self.escaped.append(None if raw is None else quoted(raw.decode("utf-8")))
            except UnicodeDecodeError:
                self.escaped.append(None)
        self.on_bytes = tokenizer.joined_bytes([]) is not None

    def name(self, token: int) -> str:
        """Return a token's text by itself; one that is not whole characters is written as its bytes, as OpenAI does."""
        raw = self.tokenizer.joined_bytes([token], special=True)
        if raw is None:
            return self.tokenizer.decode([token], special=True)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes_of(self, token: int) -> list[int]:
        """Return a token's text as a list of bytes."""
        raw = self.tokenizer.joined_bytes([token], special=True)
        return list(self.tokenizer.decode([token], special=True).encode() if raw is None else raw)


class Piece(NamedTuple):
    """The text of an event as JSON, and which of the sequence's tokens are in it."""

    text: bytes
    first: int
    last: int
    offsets: list[int] | None = None  # where in the text the tokens begin, for logprobs


class Maker(Protocol):
    """Makes the text of one sequence."""

    def take(self, tokens: list[int], *, ended: bool) -> list[Piece]:
        """Return the new pieces, from the tokens since the last call; `ended` if no more will come."""


class Plain:
    """Plain text without stop texts, joined from the table."""

    def __init__(self, table: Table):
        self._table, self._count = table, 0
        self._escaped = table.escaped.__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") if table.on_bytes else None
        self._stream = None if table.on_bytes else table.tokenizer.stream()
        self._whole = table.on_bytes  # whether the last character is complete

    def take(self, tokens: list[int], *, ended: bool) -> list[Piece]:
        """Return at most one piece."""
        first, self._count = self._count, self._count + len(tokens)
        if self._whole:
            try:
                return [Piece(b"".join(map(self._escaped, tokens)), first, self._count)]  # type: ignore[arg-type]
            except TypeError:  # a token that is part of a character
                pass
        return [Piece(quoted(self._decoded(tokens, ended)), first, self._count)]

    def _decoded(self, tokens: list[int], ended: bool) -> str:
        if self._stream is not None:
            return self._stream.extend(tokens) + (self._stream.flush() if ended else "")
        assert self._utf8 is not None
        raw = self._table.tokenizer.joined_bytes(tokens)
        assert raw is not None
        text = self._utf8.decode(raw, ended)
        self._whole = not self._utf8.getstate()[0]
        return text


class Stopped:
    """Text with stop texts, which the engine's thread looks for as tokens come."""

    def __init__(self, text: Text):
        self._text, self._count = text, 0

    def take(self, tokens: list[int], *, ended: bool) -> list[Piece]:
        """Return at most one piece; text that may become a stop text is kept back."""
        first, self._count = self._count, self._count + len(tokens)
        if ended:
            self._text.finish()
        return [Piece(quoted(self._text.release(ended=ended)), first, self._count)]


class Itemised:
    """Text token by token: for log-probabilities, and for events of `interval` tokens each."""

    def __init__(self, tokenizer: Tokenizer, text: Text | None, interval: int | None, offset: int = 0):
        self._decoder, self._text, self._interval, self._offset = tokenizer.stream(), text, interval, offset
        self._ends = [0]  # characters up to the end of each token, starting with 0
        self._made = ""  # the text, where the engine makes none
        self._shown = self._visible = 0  # tokens in events so far, characters that may be sent

    def take(self, tokens: list[int], *, ended: bool) -> list[Piece]:
        """Return a piece for each event."""
        for token in tokens:
            text = self._decoder.push(token)
            self._made += text
            self._ends.append(self._ends[-1] + len(text))
        whole = self._look(ended)
        count = len(self._ends) - 1
        ready = count if ended else self._shown
        while not ended and ready < count and self._ends[ready + 1] <= self._visible:
            ready += 1
        if ended and self._text is not None and self._text.cut:  # tokens of the stop text are left out
            while ready > self._shown and self._ends[ready - 1] >= self._visible:
                ready -= 1
        pieces = [self._piece(first, last, whole) for first, last in self._groups(ready, ended)]
        if ended:
            rest = whole[min(self._ends[self._shown], len(whole)) :]  # the text left after the last token
            if pieces:
                last = pieces.pop()
                begin = min(self._ends[last.first], len(whole))
                pieces.append(last._replace(text=quoted(whole[begin:])))
            elif rest:
                pieces.append(Piece(quoted(rest), self._shown, self._shown, []))
        return pieces

    def _look(self, ended: bool) -> str:
        if self._text is None:
            if ended:
                self._made += self._decoder.flush()
            self._visible = len(self._made)
            return self._made
        if ended:
            self._text.finish()
        self._visible += len(self._text.release(ended=ended))
        return self._text.text

    def _groups(self, ready: int, ended: bool) -> list[tuple[int, int]]:
        found, first = [], self._shown
        while first < ready:
            size = ready - first if self._interval is None else 1 if first == 0 else self._interval
            if first + size > ready and not ended:
                break
            found.append((first, min(first + size, ready)))
            first = found[-1][1]
        self._shown = first
        return found

    def _piece(self, first: int, last: int, whole: str) -> Piece:
        offsets = [self._offset + min(at, len(whole)) for at in self._ends[first:last]]
        return Piece(quoted(whole[self._ends[first] : self._ends[last]]), first, last, offsets)
