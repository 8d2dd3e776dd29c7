"""Lets a profiler watch the named steps of the torch model without the model knowing who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from warpline.model.parameters import ModelOp

#: Called with the step and its layer (None outside the blocks); what it returns is entered around the step.
Observer = Callable[[ModelOp, int | None], AbstractContextManager[object]]

_UNOBSERVED: AbstractContextManager[None] = nullcontext()
_observer: Observer | None = None


def during(step: ModelOp, layer: int | None = None) -> AbstractContextManager[object]:
    """The context in which `step` runs; nothing happens in it unless somebody observes."""
    return _UNOBSERVED if _observer is None else _observer(step, layer)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Have `observer` see every step that runs inside this context."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous
