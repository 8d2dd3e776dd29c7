"""What a watched method tells becomes marks and spans: where its steps begin, and which module the host is in.

Methods say themselves what happens (`Method.watch`); here it gets its place. Where kernels are launched by a table or
from a graph of it, that table tells the modules; where only products are seen, their order does.
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
#: Enters a module and leaves it again.
Span = Callable[[ModulePath], AbstractContextManager[object]]


def reason_against(method: type[Method]) -> str | None:
    """Why a method cannot be looked into, if it cannot."""
    return f"{method.title} {method.unseen}" if method.watch is Method.watch else None


def naming_loops(method: type[Method]) -> AbstractContextManager[object]:
    """While this is open, what torch compiles for a CPU has its loops recorded by name."""
    if not method.compiled:
        return nullcontext()
    from torch._inductor import config

    return config.patch({"cpp.enable_kernel_profile": True})  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A watcher that gives everything its path."""

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
    """While this is open, `mark` is called before each step and `span` entered around each module."""
    return method.watch(_Placed(mark, span))


# --- tables of ops ----------------------------------------------------------------------------------------------------

Op = tuple[str, ModulePath]
#: Kernels that bring requests in and tokens out.
_CROSSINGS = ("Memcpy", "Memset", "warpline_admit", "warpline_report")


def sequencer_of(method: Method, phase: str) -> Sequencer | None:
    """For executors that launch by a table or from a graph of it: which module each kernel of a step belongs to. For
    methods that show nothing else: by the order of their products, on a CPU too."""
    if method.by_order:
        layers = method.case.windowed(method.weights.config).n_layer
        return lambda names: by_products(names, layers)
    table = method.table(phase)
    if table is None:
        return None
    ops = [(step.op, op_path(step.op, step.inputs, step.layer)) for step in table]
    return lambda names: placed(names, ops)


def placed(names: Sequence[str], ops: Sequence[Op]) -> list[ModulePath | None]:
    """The modules of the kernels `names`, which ran in the order of `ops`. Ours are called like their op. Kernels of
    other names are a library's: they belong to the ops between ours, a product beginning each; where that does not come
    out even, they have no place. What crosses between host and device, and what runs where no op is left, is the step's
    own."""
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
