"""The catalog as torch operators, `torch.ops.warpline.*`: our kernels on CUDA, the reference on a CPU.

Importing this module registers them. They have fake implementations, so `torch.compile` traces through them. A torch
operator costs tens of microseconds of host time per call, so the decode loop does not use these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpline.kernels import launch
from warpline.kernels.arguments import Buffer, Scalar
from warpline.kernels.catalog import CATALOG
from warpline.kernels.spec import KernelSpec

#: Ops of the catalog without those that change the engine's state, which are useless without it.
OPERATORS = {name: spec for name, spec in CATALOG.items() if not spec.updated}

_library = torch.library.Library("warpline", "DEF")


def _schema(spec: KernelSpec) -> str:
    inputs = [f"Tensor {buffer.name}" for buffer in spec.inputs]
    numbers = [_declare(scalar) for scalar in spec.numbers]
    results = ", ".join("Tensor" for _ in spec.outputs)
    return f"{spec.name}({', '.join(inputs + numbers)}) -> {f'({results})' if len(spec.outputs) > 1 else results}"


def _declare(scalar: Scalar) -> str:
    kind = "int" if scalar.is_int else "float"
    return f"{kind}? {scalar.name}=None" if callable(scalar.default) else f"{kind} {scalar.name}={scalar.default}"


def _split(spec: KernelSpec, arguments: tuple[Any, ...]) -> tuple[list[Tensor], dict[str, float | None]]:
    count = len(spec.inputs)
    given = dict(zip((scalar.name for scalar in spec.numbers), arguments[count:], strict=False))
    inputs = zip(spec.inputs, arguments[:count], strict=True)
    return [tensor if buffer.strided else tensor.contiguous() for buffer, tensor in inputs], given


def as_floats(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the inputs in another precision; integers are not converted."""
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]


def _kind(spec: KernelSpec, buffer: Buffer, inputs: list[Tensor]) -> torch.dtype:
    """Return the element type of an output."""
    if buffer.holds.element is not None:
        return launch.TORCH_TYPES[buffer.holds.element]
    assert spec.storage is not None  # an output of the storage type has an input of it
    return inputs[spec.storage].dtype


def _result(outputs: list[Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _register(spec: KernelSpec) -> None:
    def on_gpu(*arguments: Any) -> Any:
        inputs, numbers = _split(spec, arguments)
        return _result(launch.run(spec, inputs, numbers=numbers))

    def on_cpu(*arguments: Any) -> Any:
        inputs, numbers = _split(spec, arguments)
        dims = spec.dims_of([tensor.shape for tensor in inputs])
        exact = spec.reference(*as_floats(inputs, torch.float32), **spec.number_values(dims, numbers))
        kinds = [_kind(spec, buffer, inputs) for buffer in spec.outputs]
        return _result([tensor.to(kind).contiguous() for tensor, kind in zip(exact, kinds, strict=True)])

    def fake(*arguments: Any) -> Any:
        inputs, _ = _split(spec, arguments)
        dims = spec.dims_of([tensor.shape for tensor in inputs])
        return _result([
            inputs[0].new_empty(buffer.shape(dims), dtype=_kind(spec, buffer, inputs)) for buffer in spec.outputs
        ])  # fmt: skip

    _library.define(_schema(spec))
    _library.impl(spec.name, on_gpu, "CUDA")
    _library.impl(spec.name, on_cpu, "CPU")
    torch.library.register_fake(f"warpline::{spec.name}", fake)


for _spec in OPERATORS.values():
    _register(_spec)
