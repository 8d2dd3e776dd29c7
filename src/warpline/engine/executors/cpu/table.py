"""The table of n-grams that drafts come from, as a file: what followed two to four tokens in a model's own texts.

Compiled code reads and fills it (kernels/cpu/draft.py). Its size is fixed, so it never grows. Its contents decide which
drafts are tried, and never change the text.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import numpy as np

from warpline.config import ModelConfig
from warpline.hardware import cache_dir

logger = logging.getLogger(__name__)

#: Number of entries, 8 bytes each.
ENTRIES = 1 << 17
#: Identifies the file and the format of its entries; length of the checksum that follows.
_MAGIC, _CHECK = b"warpline ngram 1", 16


def path_of(model: str, config: ModelConfig) -> Path:
    """Return the path of a model's table."""
    name = hashlib.blake2b(f"{model}\n{config}".encode(), digest_size=8).hexdigest()
    return cache_dir() / "ngrams" / f"{name}.bin"


def load(path: Path) -> np.ndarray:
    """Return the table in a file, or an empty one."""
    empty = np.zeros(ENTRIES, np.int64)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return empty
    except OSError as error:
        logger.warning("cannot read %s (%s): drafts begin with an empty table", path, error.strerror)
        return empty
    start = len(_MAGIC) + _CHECK
    data = content[start:]
    if content[:start] != _MAGIC + _checksum(data) or len(data) != empty.nbytes:
        logger.warning("%s is damaged or of another version: drafts begin with an empty table", path)
        return empty
    return np.frombuffer(data, np.int64).copy()


def save(path: Path, table: np.ndarray) -> None:
    """Write the table to a temporary file and rename it: of processes that save at the same time, the last one wins."""
    data, partial = table.tobytes(), path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(_MAGIC + _checksum(data) + data)
        partial.replace(path)
    except OSError as error:
        logger.warning("cannot keep what drafts come from in %s (%s)", path, error.strerror)


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECK).digest()
