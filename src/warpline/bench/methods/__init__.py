"""The methods that are measured: ways to generate text with the same weights, each an adapter with one signature."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from warpline.bench.methods.names import METHODS
from warpline.errors import one_of

if TYPE_CHECKING:
    from warpline.bench.methods.base import Method


def find(name: str) -> type[Method]:
    """Import and return the method called `name`; raise with the nearest name if it is unknown."""
    module, _, attribute = METHODS[one_of(name, METHODS, "method")].partition(":")
    found: type[Method] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found
