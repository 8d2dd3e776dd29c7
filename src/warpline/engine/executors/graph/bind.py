"""An op of the catalog on given memory, as something to call: its kernel on a GPU, its reference in torch elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from warpline.kernels import launch
from warpline.kernels.arguments import Dims
from warpline.kernels.compile import compile_many
from warpline.kernels.spec import KernelSpec
from warpline.kernels.torch_ops import as_floats

#: Rows up to which our product is the faster one where a library has it too. On an H200 a layer's four products of 64
#: rows took 19.1 µs and the library's 22.1, of 256 rows 32.3 and 24.3; of 128 rows about the same.
MOST_OWN_ROWS = 128
#: And outputs: the library reads GPT-2's LM head in 26 µs for 64 rows, our product in 31.
MOST_OWN_OUTPUTS = 16384


@dataclass(frozen=True, slots=True)
class Bound:
    """An op, its memory and its numbers."""

    spec: KernelSpec
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    numbers: Mapping[str, float]


def blocks_at_once(cluster: int, multiprocessors: int) -> int:
    """Blocks that run at the same time, one to an SM. Clusters of more than two leave up to a seventh of those idle."""
    return multiprocessors if cluster <= 2 else multiprocessors * 6 // 7


def suits(spec: KernelSpec, device: torch.device, kind: torch.dtype, dims: Dims, *, invariant: bool) -> bool:
    """Whether the op exists on the GPU in this dtype, with no more blocks than run at once; or, where that may not
    decide, whether it exists."""
    if device.type != "cuda":
        return False
    dtype, arch = launch.DTYPES[kind], launch.arch_of(device.index)
    if not spec.runs_on(dtype, arch):
        return False
    tunables = spec.tunables_for(dims, dtype, arch, invariant=invariant)
    if invariant or not spec.allows(dims, tunables, dtype):
        return spec.allows(dims, tunables, dtype)
    shape = spec.launch(dims, tunables, dtype)
    room = torch.cuda.get_device_properties(device).multi_processor_count
    return shape.grid <= blocks_at_once(shape.cluster, room)


#: Held while something is compiled, bound or captured: threads that do the same wait, and find it done.
PREPARING = threading.RLock()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are captured, one for each GPU: a library keeps working memory for every stream that it has seen."""
    return torch.cuda.Stream(device)


def captured(steps: Sequence[Callable[[], object]], device: torch.device) -> torch.cuda.CUDAGraph:
    """The steps as a graph. They are not run, and nothing of theirs may have to be loaded any more. What other threads
    do meanwhile is theirs: the capture is this thread's alone, and the device is not waited for."""
    graph = torch.cuda.CUDAGraph()
    with PREPARING, torch.cuda.stream(capture_stream(device)):
        torch.cuda.current_blas_handle()  # a thread's first one takes memory, which a capture forbids
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for step in steps:
                step()
        finally:
            graph.capture_end()
    return graph


def bind(ops: Sequence[Bound], *, overlapping: bool = False, invariant: bool = False) -> list[Callable[[], None]]:
    """What to call for each; kernels are compiled on all cores and loaded. Overlapping kernels begin before the one
    ahead has ended, where the GPU can, and wait only when they need its results. Invariant ones are ours, with tunables
    for which the bits of a row do not depend on the rows beside it."""
    with PREPARING:
        ahead = [None, *(op.spec for op in ops[:-1])]
        made = [
            _bind(op, overlapping and not (spec is not None and spec.makes_weights), invariant)
            for spec, op in zip(ahead, ops, strict=True)
        ]
        calls = [one for one in made if isinstance(one, launch.Call)]
        if calls:
            compile_many(list({call.program for call in calls}))
        for call in calls:
            call.prepare()
    return [one.launch if isinstance(one, launch.Call) else one for one in made]


def _bind(op: Bound, overlapping: bool, invariant: bool) -> launch.Call | Callable[[], None]:
    spec, inputs = op.spec, list(op.inputs)
    cuda = any(tensor.is_cuda for tensor in inputs)
    if spec.vendor is not None and cuda and not invariant:
        rows, outputs = op.outputs[0].shape
        if rows > MOST_OWN_ROWS or outputs > MOST_OWN_OUTPUTS:
            return partial(spec.vendor, *inputs, *op.outputs)
    if cuda:
        options = {"numbers": op.numbers, "overlapping": overlapping, "invariant": invariant}
        return launch.Call(spec, inputs, outputs=list(op.outputs), **options)
    changed = [tensor for buffer, tensor in zip(spec.inputs, inputs, strict=True) if buffer.role == "updated"]
    numbers = spec.number_values(spec.dims_of([tensor.shape for tensor in inputs]), op.numbers)

    def run() -> None:
        results = spec.reference(*as_floats(inputs, torch.float32), **numbers)  # in float32, as the kernels compute
        for target, result in zip([*op.outputs, *changed], results, strict=True):
            target.copy_(result)

    return run
