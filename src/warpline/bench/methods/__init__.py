"""Who is measured: ways to generate text with the same weights, each a small adapter with one signature."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from warpline.bench.methods.names import METHODS
from warpline.errors import one_of

if TYPE_CHECKING:
    from warpline.bench.methods.base import Method


def find(name: str) -> type[Method]:
    """The method called `name`; an unknown name suggests the nearest."""
    module, _, attribute = METHODS[one_of(name, METHODS, "method")].partition(":")
    found: type[Method] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found
