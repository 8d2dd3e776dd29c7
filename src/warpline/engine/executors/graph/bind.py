"""Binds an op of the catalog to memory: the result launches its kernel on a GPU, or runs its reference elsewhere."""

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

#: Most rows for which our product is used where a library has it too. On an H200 a layer's four products of 64 rows
#: took 19.1 µs, the library's 22.1; of 256 rows 32.3 and 24.3; of 128 rows about the same.
MOST_OWN_ROWS = 128
#: Most outputs for the same: the library reads GPT-2's LM head in 26 µs for 64 rows, our product in 31.
MOST_OWN_OUTPUTS = 16384


@dataclass(frozen=True, slots=True)
class Bound:
    """An op with its memory and its numbers."""

    spec: KernelSpec
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    numbers: Mapping[str, float]


def blocks_at_once(cluster: int, multiprocessors: int) -> int:
    """Return how many blocks run at the same time, one per SM. Clusters of more than two leave up to a seventh of them
    idle."""
    return multiprocessors if cluster <= 2 else multiprocessors * 6 // 7


def suits(spec: KernelSpec, device: torch.device, kind: torch.dtype, dims: Dims, *, invariant: bool) -> bool:
    """Whether the op exists on the GPU in this dtype, with no more blocks than run at once. Invariant: whether it
    exists, because the number of blocks must not decide."""
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


#: Held while something is compiled, bound or captured; other threads with the same work wait, and find it done.
PREPARING = threading.RLock()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for captures, one per GPU: a library keeps working memory for every stream that it has seen."""
    return torch.cuda.Stream(device)


def captured(steps: Sequence[Callable[[], object]], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture the steps as a graph, without running them. Requires: all that they launch is loaded. The capture belongs
    to this thread alone; other threads go on, and the device is not synchronised."""
    graph = torch.cuda.CUDAGraph()
    with PREPARING, torch.cuda.stream(capture_stream(device)):
        torch.cuda.current_blas_handle()  # a thread's first one allocates, which a capture forbids
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for step in steps:
                step()
        finally:
            graph.capture_end()
    return graph


def bind(ops: Sequence[Bound], *, overlapping: bool = False, invariant: bool = False) -> list[Callable[[], None]]:
    """Return a function to call for each op; kernels are compiled on all cores and loaded.

    Overlapping kernels begin before the preceding one has ended, where the GPU can, and wait only before they use its
    results. Invariant ones are our kernels, with tunables for which a row's bits do not depend on the other rows."""
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
