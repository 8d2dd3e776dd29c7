"""A client that costs little, because it is not what is measured: during a run it only notes when bytes came. They are
parsed afterwards (`answers.py`)."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from warpline.serve.address import Address


@dataclass(slots=True)
class Raw:
    """The bytes of an answer, and when they came (in seconds of `time.perf_counter`)."""

    sent: float
    status: int = 0
    #: (time, bytes) of the body as they came.
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    #: What went wrong with the connection; None if nothing did.
    error: str | None = None


class Target(NamedTuple):
    """Where a server is, and the API key of every request to it."""

    address: Address
    key: str | None = None

    @property
    def url(self) -> str:
        """The address of the server as shown to users."""
        return self.address.url

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        lines = [f"{method} {self.address.prefix}{path} HTTP/1.1", f"Host: {self.address.host}:{self.address.port}"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """One HTTP connection, reused for one request after the other."""

    def __init__(self) -> None:
        import httptools

        self._make_parser = httptools.HttpResponseParser
        self._broken = httptools.HttpParserError
        self._transport: asyncio.Transport | None = None
        self._answer: Raw | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._until_closed = False
        self.open = False

    async def ask(self, request: bytes, timeout: float) -> Raw:
        """Send a request and wait for the whole answer; failures are reported in `Raw.error`."""
        assert self._transport is not None
        self._parser = self._make_parser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._until_closed = True
        answer = self._answer = Raw(time.perf_counter())
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout):
                await self._done
        except TimeoutError:
            answer.error = f"no whole answer within {timeout:g} s"
            self.close()
        answer.ended = answer.ended or time.perf_counter()
        return answer

    def close(self) -> None:
        """Abort the connection."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        self._transport, self.open = cast(asyncio.Transport, transport), True  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        """Pass bytes from the server to the parser, with the time they came."""
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            return
        try:
            self._parser.feed_data(data)
        except self._broken as error:
            self._fail(f"the answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer; it is complete only if it had no length and the connection closed without an error."""
        self.open = False
        whole = self._answer is not None and self._answer.status and self._until_closed and error is None
        self._finish() if whole else self._fail(f"the server hung up ({error or 'before the end'})")

    # --- called by the parser -----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the answer has a length; without one it ends with the connection."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_closed = False

    def on_headers_complete(self) -> None:
        """Note the status."""
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Note a part of the body and when it came."""
        assert self._answer is not None
        self._answer.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """End the answer; the connection stays open if the server keeps it alive."""
        if not self._parser.should_keep_alive():
            self.open = False
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            assert self._answer is not None
            self._answer.ended = time.perf_counter()
            self._done.set_result(None)

    def _fail(self, why: str) -> None:
        self.open = False
        if self._done is not None and not self._done.done():
            assert self._answer is not None
            self._answer.error = why
            self._done.set_result(None)


async def connect(target: Target) -> Connection:
    """Open a connection to a server."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if target.address.secure else None
    try:
        _, found = await loop.create_connection(Connection, target.address.host, target.address.port, ssl=context)
    except OSError as error:
        raise ConnectionError(f"{target.url} cannot be reached: {error.strerror or error}") from error
    return found


async def once(target: Target, method: str, path: str, body: bytes = b"", timeout: float = 30) -> Raw:
    """Send one request on a connection of its own."""
    connection = await connect(target)
    try:
        return await connection.ask(target.request(method, path, body), timeout)
    finally:
        connection.close()
