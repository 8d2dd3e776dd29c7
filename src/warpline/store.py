"""Small files of the user that several processes may write at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from warpline.errors import ConfigError


def slug(name: str) -> str:
    """Return a name, such as a GPU's, as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def update(path: Path, make: Callable[[], str]) -> Path:
    """Write what `make` returns; it may read the file, and no other process writes it meanwhile."""
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
