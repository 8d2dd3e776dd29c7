"""`--small` runs only the kernels' small shapes, for checkers that slow everything down."""

from __future__ import annotations

import math

import pytest

#: Product of the extents that an op touches.
SMALL = 300_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--small", action="store_true", help="only the kernels' small shapes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--small"):
        return
    kept = [item for item in items if _is_small(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _is_small(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    if parameters is None or "dims" not in parameters.params:
        return False
    dims, spec = parameters.params["dims"], parameters.params.get("spec")
    touched = dims if spec is None else {name for b in spec.inputs + spec.outputs for name in b.touched or b.dims}
    return bool(math.prod(extent for name, extent in dims.items() if name in touched) <= SMALL)
