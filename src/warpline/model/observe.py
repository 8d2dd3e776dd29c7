"""Lets a profiler watch the named steps of the torch model, which does not depend on the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from warpline.model.parameters import ModelOp

#: Called with the step and its layer (None outside the blocks); its result is entered around the step.
Observer = Callable[[ModelOp, int | None], AbstractContextManager[object]]

_UNOBSERVED: AbstractContextManager[None] = nullcontext()
_observer: Observer | None = None


def during(step: ModelOp, layer: int | None = None) -> AbstractContextManager[object]:
    """Return the context in which `step` runs; it does nothing unless an observer is set."""
    return _UNOBSERVED if _observer is None else _observer(step, layer)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Report every step that runs inside this context to `observer`."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous
