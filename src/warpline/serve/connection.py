"""uvicorn's connection, with limits on size and time of a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from warpline.serve import state
from warpline.serve.errors import ApiError

#: Seconds within which the head of a request must arrive, and most bytes it may have.
HEAD_SECONDS, HEAD_BYTES = 10.0, 64 << 10
#: Most connections at once; a new one beyond that is refused with 503.
MOST_CONNECTIONS = 4096


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._head_bytes, self._in_head = 0, True
        self._deadline: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None  # timer that checks whether the client reads
        self._answered = 0  # number of requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the deadline of the first head, or refuse if there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self._refuse(ApiError(503, "too many connections: try again in a moment", retry_after=1))
        else:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._no_deadline()
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Check the size of the head before the parser gets the bytes."""
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
        """Give the app a way to abort the connection."""
        super().on_message_begin()
        self.scope["warpline.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """End the deadline: the head is complete, only the body follows."""
        self._in_head, self._head_bytes = False, 0
        self._no_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the head of the next request."""
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Count the answer, which is handed to the transport but perhaps not read yet, and watch whether it is read."""
        super().on_response_complete()
        self._answered += 1
        if self._patience is None:
            self._look_at_reader(None)

    def _look_at_reader(self, before: tuple[int, int] | None) -> None:
        """Abort the connection if nothing was read since the last look although something is left. Closing it instead
        would wait for the reader."""
        self._patience, left = None, self.transport.get_write_buffer_size()
        now = self._answered, left
        if left and now == before and not self._answering:
            self.transport.abort()
        elif left:
            self._patience = self.loop.call_later(state.SLOW_READER, self._look_at_reader, now)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(ApiError(400, "this is not a valid HTTP request"))

    def _too_slow(self) -> None:
        self._deadline = None
        if self._answering:  # a pipelined request may wait for the answer to the one before it
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
        if self._answering:  # a second answer inside the first would be read as a part of it
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
