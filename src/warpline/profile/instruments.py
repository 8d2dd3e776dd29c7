"""How each method of the benchmark is watched: where its steps begin, and which module the host is in.

A method runs as it always does; what is put around it here is taken away again. Steps are marked where the host begins
one; modules are seen through `model.observe`, through hooks on transformers' modules, or, where kernels are launched by
a table or from a graph, by that table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from warpline.bench.methods.base import Method
from warpline.bench.methods.hf import StaticCompiled, _Transformers
from warpline.bench.methods.ours import (
    Naive,
    NaiveCompiled,
    OnCpu,
    OnKernels,
    OnPersistent,
    OnTorch,
    OnTorchCompiled,
    _OnExecutor,
)
from warpline.bench.methods.static_kv import StaticKV, StaticKVCompiled
from warpline.engine.executor import Executor
from warpline.engine.kernels_exec import KernelsExecutor
from warpline.engine.prompts import Pass
from warpline.engine.schedule import block_parameters, decode_step, head_parameters
from warpline.engine.state import State
from warpline.errors import ConfigError
from warpline.model.observe import observed
from warpline.model.parameters import Step
from warpline.model.weights import Weights
from warpline.profile.events import Sequencer
from warpline.profile.names import WHOLE, hf_path, op_path, path_of
from warpline.profile.order import begins_product, by_products
from warpline.profile.session import ModulePath

#: What a call of the cpu executor's compiled code is called among operators.
CPU_DECODE = "warpline_cpu_decode"

Mark = Callable[[], None]
#: Enters a module and leaves it again.
Span = Callable[[ModulePath], AbstractContextManager[object]]


def reason_against(method: type[Method]) -> str | None:
    """Why a method cannot be looked into, if it cannot."""
    if issubclass(method, Naive | _OnExecutor | _Transformers | StaticKV):
        return None
    return f"{method.title} computes outside of torch, and nothing can be seen of it: 'warpline bench' times it"


def naming_loops(method: type[Method]) -> AbstractContextManager[object]:
    """While this is open, what torch compiles for a CPU has its loops recorded by name."""
    if not issubclass(method, NaiveCompiled | OnTorchCompiled | StaticKVCompiled | StaticCompiled):
        return nullcontext()
    from torch._inductor import config

    return config.patch({"cpp.enable_kernel_profile": True})  # type: ignore[no-any-return]


@contextmanager
def watched(method: Method, mark: Mark, span: Span) -> Iterator[None]:
    """While this is open, `mark` is called before each step and `span` entered around each module."""
    with ExitStack() as stack:
        if isinstance(method, Naive):
            stack.enter_context(_before_forward(method.model, mark))
        elif isinstance(method, OnTorch):
            model: Any = method._executor.model  # type: ignore[attr-defined]
            stack.enter_context(_before_forward(model, mark))
        elif isinstance(method, _Transformers):
            stack.enter_context(_replaced(method.model, "prepare_inputs_for_generation", mark))
            if not isinstance(method, StaticCompiled):
                stack.enter_context(_hooked(method.model, span))
        elif isinstance(method, StaticKV):
            if method._graphs is None:
                stack.enter_context(_replaced(method, "_next", mark))
            else:
                stack.enter_context(_replays(method._graphs, mark))
        elif isinstance(method, OnCpu):
            stack.enter_context(_replaced(method._executor, "_prefill", mark))
            stack.enter_context(_step_by_step(method._executor, mark, span))
        elif isinstance(method, _OnExecutor):
            stack.enter_context(_replaced(method._executor, "_prefill", mark))
            if isinstance(method._executor, KernelsExecutor):
                stack.enter_context(_replaced(method._executor, "_step", mark))
        else:
            raise ConfigError(str(reason_against(type(method))))
        if isinstance(method, Naive | OnTorch) and not isinstance(method, NaiveCompiled | OnTorchCompiled):
            stack.enter_context(observed(lambda step, layer: _entered(span, step, layer)))
        yield


def _entered(span: Span, step: Step, layer: int | None) -> AbstractContextManager[object]:
    return span(path_of(step, layer))


@contextmanager
def _before_forward(module: Any, mark: Mark) -> Iterator[None]:
    hook = module.register_forward_pre_hook(lambda *_: mark())
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _replaced(owner: Any, name: str, mark: Mark) -> Iterator[None]:
    """Have `mark` called before the owner's method of that name; an attribute of its own is put back as it was."""
    before, own = getattr(owner, name), vars(owner).get(name)

    @functools.wraps(before)  # transformers looks at its signature
    def marked(*args: Any, **kwargs: Any) -> Any:
        mark()
        return before(*args, **kwargs)

    if own is None and isinstance(owner, torch.nn.Module):
        object.__setattr__(owner, name, marked)
    else:
        setattr(owner, name, marked)
    try:
        yield
    finally:
        if own is None:
            vars(owner).pop(name)
        else:
            setattr(owner, name, own)


@contextmanager
def _step_by_step(executor: Executor, mark: Mark, span: Span) -> Iterator[None]:
    """The cpu executor decodes any number of tokens in one call of compiled code, which nobody sees from outside: here
    each has a call of its own, with a mark before it, and a name among torch's operators."""
    decode, compute = executor.decode, executor._decode

    def marked(state: State, n: int) -> None:
        for _ in range(n):
            mark()
            with span((WHOLE,)):
                decode(state, 1)

    def named(state: State, n: int) -> None:
        with record_function(CPU_DECODE):
            compute(state, n)

    vars(executor).update(decode=marked, _decode=named)
    try:
        yield
    finally:
        for name in ("decode", "_decode"):
            del vars(executor)[name]


class _Marked:
    """A captured graph that says when it is replayed."""

    def __init__(self, graph: Any, mark: Mark):
        self._graph, self._mark = graph, mark

    def replay(self) -> None:
        """As the graph does."""
        self._mark()
        self._graph.replay()


@contextmanager
def _replays(graphs: Any, mark: Mark) -> Iterator[None]:
    begin, step = graphs._begin, graphs._step
    graphs._begin = _Marked(begin, mark)
    graphs._step = None if step is None else _Marked(step, mark)
    try:
        yield
    finally:
        graphs._begin, graphs._step = begin, step


@contextmanager
def _hooked(model: Any, span: Span) -> Iterator[None]:
    """Spans around transformers' modules, by their names."""
    open_spans: list[AbstractContextManager[object]] = []
    hooks = []

    def enters(path: ModulePath) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            open_spans.append(span(path))
            open_spans[-1].__enter__()

        return enter

    def leave(*_: Any) -> None:
        open_spans.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if (path := hf_path(name)) is not None:
            hooks += [module.register_forward_pre_hook(enters(path)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- tables of ops ----------------------------------------------------------------------------------------------------

Op = tuple[str, ModulePath]


def by_order(method: Method) -> bool:
    """Whether nobody sees its modules, so that only the order of its products tells them."""
    return isinstance(method, StaticKV | NaiveCompiled | OnTorchCompiled | StaticCompiled)


def sequencer_of(method: Method, phase: str) -> Sequencer | None:
    """For executors that launch by a table or from a graph of it: which module each kernel of a step belongs to. For
    others that nobody can look into: by the order of their products, on a CPU too."""
    if by_order(method):
        layers = method.case.windowed(method.weights.config).n_layer
        return lambda names: by_products(names, layers)
    if not isinstance(method, OnKernels | OnPersistent):
        return None
    state, executor = method._state, method._executor
    assert state is not None  # it has generated before
    weights: Weights = executor._prompts._weights  # type: ignore[attr-defined]
    if phase == "decode":
        rows = executor._rows(state) if isinstance(executor, KernelsExecutor) else state.batch
        steps = decode_step(weights, rows, state.needs.end)
        ops = [(s.op, op_path(s.op, s.inputs, s.layer)) for s in steps]
    else:
        passes: dict[Any, Pass] = state.kept[executor._prompts]  # type: ignore[attr-defined]
        (batch, length, _), prompt = list(passes.items())[-1]
        ops = _ops_of(prompt, {**block_parameters(weights, batch * length), **head_parameters(weights, batch)})
    return lambda names: placed(names, ops)


def _ops_of(prompt: Pass, parameters: Mapping[str, Tensor]) -> list[Op]:
    """The table of a pass over prompts, each op with its parameters found by where they lie."""
    names = {tensor.data_ptr(): name for name, tensor in parameters.items()}
    ops: list[Op] = []
    layer: int | None = None
    for bound in prompt.bound:
        read = [names[t.data_ptr()] for t in bound.inputs if t.data_ptr() in names]
        path = op_path(bound.spec.name, read, layer if bound.spec.name == "prompt_attention" else None)
        if path[0].startswith("h."):
            layer = int(path[0][2:])
        ops.append((bound.spec.name, path))
    return ops


def placed(names: Sequence[str], ops: Sequence[Op]) -> list[ModulePath | None]:
    """The modules of the kernels `names`, which ran in the order of `ops`. Ours are called like their op. Kernels of
    other names are a library's: they belong to the ops between ours, a product beginning each; where that does not come
    out even, nobody knows. Copies, and what runs where no op is left, such as taking in prompts, are the step's own."""
    copies = [name.startswith(("Memcpy", "Memset")) for name in names]
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
