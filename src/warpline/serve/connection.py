"""A connection: uvicorn's, with bounds on what comes before a request's body, and on how long that takes."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from warpline.serve import state
from warpline.serve.errors import ApiError

#: Seconds in which the head of a request must have come, and bytes that it may have.
HEAD_SECONDS, HEAD_BYTES = 10.0, 64 << 10
#: Connections at once; beyond that a new one is told to come again.
MOST_CONNECTIONS = 4096


class Connection(HttpToolsProtocol):
    """One for each client's connection."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._head_bytes, self._in_head = 0, True
        self._deadline: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None  # with a reader
        self._answered = 0  # requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self._refuse(ApiError(503, "too many connections: try again in a moment", retry_after=1))
        else:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._no_deadline()
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request, or of several."""
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES + len(data) or (
                self._head_bytes > HEAD_BYTES and b"\r\n\r\n" not in data[: HEAD_BYTES + 4]
            ):
                self._refuse(ApiError(431, f"the head of the request has more than {HEAD_BYTES:,} bytes"))
                return
            if self._deadline is None:
                self._deadline = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["warpline.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """All but its body has come."""
        self._in_head, self._head_bytes = False, 0
        self._no_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it has come."""
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """All of an answer has been handed over to be sent; whether anybody reads it is another matter."""
        super().on_response_complete()
        self._answered += 1
        if self._patience is None:
            self._look_at_reader(None)

    def _look_at_reader(self, before: tuple[int, int] | None) -> None:
        """End the connection if nothing has happened since the last look and something is left to be read. Closing it
        would wait for the reader."""
        self._patience, left = None, self.transport.get_write_buffer_size()
        now = self._answered, left
        if left and now == before and not self._answering:
            self.transport.abort()
        elif left:
            self._patience = self.loop.call_later(state.SLOW_READER, self._look_at_reader, now)

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._refuse(ApiError(400, "this is not a valid HTTP request"))

    def _too_slow(self) -> None:
        self._deadline = None
        if self._answering:  # what came early may wait until there is an answer to what came before
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        elif not self.transport.is_closing():
            if self._head_bytes:
                self._refuse(ApiError(408, f"the head of the request did not come within {HEAD_SECONDS:g} s"))
            else:
                self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        self._no_deadline()
        if self._answering:  # a second answer inside the first would be taken for a part of it
            self.transport.abort()
            return
        body = error.body()
        phrase = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
        head = (
            f"HTTP/1.1 {error.status} {phrase.get(error.status, 'Service Unavailable')}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
