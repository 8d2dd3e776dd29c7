"""One call makes a Hugging Face GPT-2 faster, and another one undoes it.

    import warpline.hf as whf
    print(whf.patch(model))

Names are loaded on first use: importing this package needs neither torch nor transformers. No module of this room may
have one of these names: importing it would replace the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpline.hf.attention import register
    from warpline.hf.patching import patch, patched, unpatch
    from warpline.hf.report import Report

_HOMES = {
    "patch": "warpline.hf.patching",
    "unpatch": "warpline.hf.patching",
    "patched": "warpline.hf.patching",
    "Report": "warpline.hf.report",
    "register": "warpline.hf.attention",
}

__all__ = ["Report", "patch", "patched", "register", "unpatch"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'warpline.hf' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
