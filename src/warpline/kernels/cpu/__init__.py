"""What runs on a CPU: loops compiled by numba and kept in the cache folder.

numba knows when a function's own file has changed, not when another has that it calls, so what it keeps goes into a
folder named by all of these sources.
"""

import hashlib
from pathlib import Path

import numba

from warpline.hardware import cache_dir

_SOURCES = hashlib.blake2b(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
_usual = numba.config.CACHE_DIR
numba.config.CACHE_DIR = str(cache_dir() / "cpu" / _SOURCES.hexdigest()[:16])
try:
    from warpline.kernels.cpu import decode as decode  # functions take their folder when they are decorated
finally:
    numba.config.CACHE_DIR = _usual  # others keep theirs where they like
