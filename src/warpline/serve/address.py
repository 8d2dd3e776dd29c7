"""The address of a server."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from warpline.errors import ConfigError


class Address(NamedTuple):
    """The parts of a base URL."""

    host: str
    port: int
    secure: bool
    prefix: str  # before all paths, without the /v1

    @property
    def url(self) -> str:
        """The address as shown to users."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"


def address_of(url: str) -> Address:
    """Parse a base URL, with or without http:// before it and /v1 at its end."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(f"'{url}' is no address of a server: write http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if secure else 80), secure, prefix)
