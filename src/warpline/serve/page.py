"""The page at /: one file that loads nothing else; the browser checks its scripts and styles by their hashes."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources


@functools.cache
def page() -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the page and its headers.

    Only the contents of its <script> and <style> elements run: no style or event attributes, no other files. It may
    connect to this server only.
    """
    body = resources.files("warpline.serve").joinpath("page.html").read_bytes()
    return body, headers(body)


def headers(body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that restrict what a page of ours may do."""
    rules = [
        "default-src 'none'",
        f"script-src {_hashes(body, b'script')}",
        f"style-src {_hashes(body, b'style')}",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return [
        (b"content-security-policy", "; ".join(rules).encode()),
        (b"cache-control", b"no-cache"),
        (b"referrer-policy", b"no-referrer"),
    ]


def _hashes(body: bytes, element: bytes) -> str:
    found = re.findall(rb"<%s(?:\s[^>]*)?>(.*?)</%s>" % (element, element), body, re.DOTALL)
    made = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in found]
    return " ".join(f"'sha256-{one}'" for one in made) or "'none'"
