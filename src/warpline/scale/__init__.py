"""Runs beyond one process: the server as Ray Serve replicas (`deployment`), batches over files (`generate`), and what a
number of replicas would give (`simulate`). Ray is imported only when it is needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warpline.scale.batch import generate
    from warpline.scale.online import deployment

_HOMES = {"deployment": "warpline.scale.online", "generate": "warpline.scale.batch"}

__all__ = ["deployment", "generate"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'warpline.scale' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "simulate"])
