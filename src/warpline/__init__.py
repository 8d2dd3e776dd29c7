"""Fast GPT-2 inference on GPUs and CPUs, and the instruments that measure it.

Public names are loaded on first use, so that ``import warpline`` costs nothing.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than all of this
    from typing import Any

    from warpline.config import EngineConfig, ModelConfig, SamplingParams
    from warpline.engine.llm import LLM
    from warpline.engine.stream import Stream
    from warpline.engine.text import Completion, Timings, TokenLogprob
    from warpline.errors import WarplineError

__version__ = "0.1.0"

_HOMES = {
    "LLM": "warpline.engine.llm",
    "Stream": "warpline.engine.stream",
    "Completion": "warpline.engine.text",
    "Timings": "warpline.engine.text",
    "TokenLogprob": "warpline.engine.text",
    "EngineConfig": "warpline.config",
    "ModelConfig": "warpline.config",
    "SamplingParams": "warpline.config",
    "WarplineError": "warpline.errors",
}

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "ModelConfig",
    "SamplingParams",
    "Stream",
    "Timings",
    "TokenLogprob",
    "WarplineError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'warpline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
