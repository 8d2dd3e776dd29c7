"""The page at /: one file, with nothing in it from elsewhere, and headers that keep it so."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources


@functools.cache
def page() -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The page, and its headers: it may run its own script and style and ask its own server, and nothing else."""
    body = resources.files("warpline.serve").joinpath("page.html").read_bytes()
    policy = [
        "default-src 'none'",
        f"script-src {_hashes(b'script', body)}",
        f"style-src {_hashes(b'style', body)}",
        "connect-src 'self'",
        "img-src data:",  # its icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = [
        (b"content-security-policy", "; ".join(policy).encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]
    return body, headers


def _hashes(tag: bytes, body: bytes) -> str:
    """Of everything between such tags."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'" for inside in found)
