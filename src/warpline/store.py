"""Small files of the user's own that several processes may write at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from warpline.errors import ConfigError


def slug(name: str) -> str:
    """A GPU's name, say, as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def update(path: Path, make: Callable[[], str]) -> Path:
    """Write what `make` returns, which may read the file: meanwhile nobody else writes it."""
    import fcntl

    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            partial.write_text(make(), encoding="utf-8")
            partial.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write {path} ({reason}): set WARPLINE_CACHE_DIR to a writable folder") from error
    return path
