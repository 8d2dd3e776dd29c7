"""The catalog as torch operators, `torch.ops.warpline.*`: our kernels on CUDA, the reference on a CPU.

Importing this module registers them. They have fake implementations, so `torch.compile` traces through them. A
torch operator costs tens of microseconds of host time per call, so the decode loop does not use these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpline.kernels import launch
from warpline.kernels.catalog import CATALOG
from warpline.kernels.spec import KernelSpec, as_kwargs

_library = torch.library.Library("warpline", "DEF")


def _schema(spec: KernelSpec) -> str:
    inputs = [f"Tensor {buffer.name}" for buffer in spec.inputs]
    floats = [f"float {scalar.name}={scalar.default}" for scalar in spec.floats]
    results = ", ".join("Tensor" for _ in spec.outputs)
    return f"{spec.name}({', '.join(inputs + floats)}) -> {f'({results})' if len(spec.outputs) > 1 else results}"


def _split(spec: KernelSpec, arguments: tuple[Any, ...]) -> tuple[list[Tensor], dict[str, float]]:
    count = len(spec.inputs)
    given = dict(zip((scalar.name for scalar in spec.floats), arguments[count:], strict=False))
    return [tensor.contiguous() for tensor in arguments[:count]], as_kwargs(spec, given)


def as_floats(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The inputs in another precision; indices stay what they are."""
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]


def _storage(inputs: list[Tensor]) -> Tensor:
    return next(tensor for tensor in inputs if tensor.is_floating_point())


def _result(outputs: list[Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _register(spec: KernelSpec) -> None:
    def on_gpu(*arguments: Any) -> Any:
        inputs, floats = _split(spec, arguments)
        return _result(launch.run(spec, inputs, floats=floats))

    def on_cpu(*arguments: Any) -> Any:
        inputs, floats = _split(spec, arguments)
        spec.dims_of([tensor.shape for tensor in inputs])
        exact = spec.reference(*as_floats(inputs, torch.float32), **floats)
        return _result([tensor.to(_storage(inputs).dtype) for tensor in exact])

    def fake(*arguments: Any) -> Any:
        inputs, _ = _split(spec, arguments)
        dims = spec.dims_of([tensor.shape for tensor in inputs])
        return _result([_storage(inputs).new_empty(buffer.shape(dims)) for buffer in spec.outputs])

    _library.define(_schema(spec))
    _library.impl(spec.name, on_gpu, "CUDA")
    _library.impl(spec.name, on_cpu, "CPU")
    torch.library.register_fake(f"warpline::{spec.name}", fake)


for _spec in CATALOG.values():
    _register(_spec)
