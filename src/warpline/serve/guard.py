"""Checks each request: its API key, the name it uses for the server, and the origin of a browser's page."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from warpline.serve.errors import ApiError
from warpline.serve.state import State

#: Paths that need no key.
OPEN = frozenset({"/health"})


class Guard:
    """Runs before the routes."""

    def __init__(self, app: ASGIApp, state: State):
        self._app, self._state, settings = app, state, state.settings
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with an error."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                self._state.metrics.answered("other", error.status)
                await self._state.respond(send, error.status, error.body(), headers=error.headers())
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and _hostname(host) not in self._hosts:
            raise ApiError(421, "this server is not called that: start it with --allowed-host to say so", close=True)
        origin = headers.get(b"origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            self._check_origin(origin.decode("latin-1").lower(), host)
        if self._keys and scope["path"] not in OPEN:
            self._check_key(headers.get(b"authorization", b""))

    def _check_origin(self, origin: str, host: str) -> None:
        """Check a browser's origin: requests from pages other than our own need --cors-origin."""
        if urlsplit(origin).netloc != host and origin not in self._origins and "*" not in self._origins:
            raise ApiError(403, "requests from other pages are not allowed: start the server with --cors-origin")

    def _check_key(self, said: bytes) -> None:
        kind, _, value = said.partition(b" ")
        value = value.strip()
        if kind.lower() == b"basic":  # a browser asks its user for any name, and for the key as password
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                value = b""
        elif kind.lower() != b"bearer":
            value = b""
        digest = _digest(value)
        same = [hmac.compare_digest(digest, key) for key in self._keys]  # compares all keys, in constant time
        if not any(same):
            raise ApiError(
                401, "the API key is missing or wrong: send it as 'Authorization: Bearer …'", code="invalid_api_key"
            )


def _digest(key: bytes) -> bytes:
    """Return a digest of fixed length, independent of the key's."""
    return hashlib.sha256(key).digest()


def _hostname(host: str) -> str:
    """Return the host without the port."""
    return host[: host.rindex(":")] if ":" in host and not host.endswith("]") else host
