"""Turns what a watched method reports into marks and spans: where its steps begin, and which module the host is in.

Methods report their steps and parts themselves (`Method.watch`); this module adds the paths. Where kernels are launched
from an op table, or a graph of it, that table gives their modules; elsewhere the order of the products may do so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from warpline.bench.methods.base import Method
from warpline.model.parameters import ModelOp
from warpline.profile.events import Sequencer
from warpline.profile.names import hf_path, op_path, path_of
from warpline.profile.order import begins_product, by_products
from warpline.profile.session import ModulePath

Mark = Callable[[], None]
#: Returns the context of a module.
Span = Callable[[ModulePath], AbstractContextManager[object]]


def reason_against(method: type[Method]) -> str | None:
    """Return why a method cannot be profiled; None if it can."""
    return f"{method.title} {method.unseen}" if method.watch is Method.watch else None


def naming_loops(method: type[Method]) -> AbstractContextManager[object]:
    """Record the loops that torch compiles for a CPU by name while the context is open."""
    if not method.compiled:
        return nullcontext()
    from torch._inductor import config

    return config.patch({"cpp.enable_kernel_profile": True})  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A watcher that turns steps and modules into paths."""

    mark: Mark
    span: Span

    def step(self) -> None:
        self.mark()

    def part(self, step: ModelOp, layer: int | None) -> AbstractContextManager[object]:
        return self.span(path_of(step, layer))

    def module(self, name: str) -> Callable[[], AbstractContextManager[object]] | None:
        path = hf_path(name)
        return None if path is None else partial(self.span, path)


def watched(method: Method, mark: Mark, span: Span) -> AbstractContextManager[object]:
    """Call `mark` before each step and enter `span` around each module while the context is open."""
    return method.watch(_Placed(mark, span))


# --- tables of ops ----------------------------------------------------------------------------------------------------

Op = tuple[str, ModulePath]
#: Kernels that bring requests in and tokens out.
_CROSSINGS = ("Memcpy", "Memset", "warpline_admit", "warpline_report")


def sequencer_of(method: Method, phase: str) -> Sequencer | None:
    """Return the function that places the kernels of a step: by the op table for executors that have one, by the order
    of products for methods that show nothing else, also on a CPU. None if there is neither."""
    if method.by_order:
        layers = method.case.windowed(method.weights.config).n_layer
        return lambda names: by_products(names, layers)
    table = method.table(phase)
    if table is None:
        return None
    ops = [(step.op, op_path(step.op, step.inputs, step.layer)) for step in table]
    return lambda names: placed(names, ops)


def placed(names: Sequence[str], ops: Sequence[Op]) -> list[ModulePath | None]:
    """Return the modules of the kernels `names`, which ran in the order of `ops`. Our kernels are named like their op.
    Others belong to a library: they are given to the ops between ours, each beginning with a product; where the counts
    differ, they get None. Copies between host and device, and kernels where no op is left, belong to the step."""
    copies = [name.startswith(_CROSSINGS) for name in names]
    found: list[ModulePath | None] = []
    foreign: list[str] = []
    at = 0
    for name in [*(name for name, copied in zip(names, copies, strict=True) if not copied), None]:
        ours = None if name is None else name.removeprefix("warpline_")
        if name is not None and name == ours:
            foreign.append(name)
            continue
        ahead = len(ops) if ours is None else next((i for i in range(at, len(ops)) if ops[i][0] == ours), None)
        found += _spread(foreign, [] if ahead is None else ops[at:ahead])
        foreign = []
        if ahead is None:
            found.append(None)
        elif name is not None:
            found.append(ops[ahead][1])
            at = ahead + 1
    rest = iter(found)
    return [() if copied else next(rest) for copied in copies]


def _spread(names: Sequence[str], ops: Sequence[Op]) -> list[ModulePath | None]:
    if not ops:  # nothing of the table is missing here
        return [()] * len(names)
    products = [i for i, name in enumerate(names) if begins_product(name)]
    if products[:1] != [0] or len(products) != len(ops):
        return [None] * len(names)
    return [ops[sum(i <= at for i in products) - 1][1] for at in range(len(names))]
