"""Load a compiled kernel into the current device and launch it on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpline.errors import ConfigError, KernelError
from warpline.kernels.compile import compile_one
from warpline.kernels.spec import Buffer, KernelSpec, Launch, Tunables, Variant, as_kwargs

#: torch's names of the storage types.
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Kernel:
    """One variant, loaded on one device."""

    def __init__(self, variant: Variant, device: int, arch: str):
        self.variant, self.device = variant, device
        driver = _driver()
        binary = compile_one(variant, arch)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes sure that torch has set up its context
            status, self._module = driver.cuModuleLoadData(binary.code)
            _check(driver, status, f"loading {variant.label} for {arch}")
            status, self._function = driver.cuModuleGetFunction(self._module, variant.entry.encode())
            _check(driver, status, f"finding {variant.entry}")
        fixed = dict(variant.constants)
        self._arguments = [a for a in variant.spec.arguments if isinstance(a, Buffer) or a.name not in fixed]

    def launch(self, shape: Launch, values: Mapping[str, Tensor | float | int]) -> None:
        """Enqueue one launch; `values` holds every argument by name."""
        driver = _driver()
        cells: list[ctypes.c_void_p | ctypes.c_int | ctypes.c_float] = []
        for argument in self._arguments:
            value = values[argument.name]
            if isinstance(value, Tensor):
                cells.append(ctypes.c_void_p(value.data_ptr()))
            elif isinstance(argument, Buffer):
                raise ConfigError(f"{self.variant.spec.name}: {argument.name} must be a tensor")
            else:
                cells.append(ctypes.c_int(int(value)) if argument.is_dimension else ctypes.c_float(value))
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        (status,) = driver.cuLaunchKernel(
            self._function,
            shape.grid,
            1,
            1,
            shape.block,
            1,
            1,
            shape.shared_bytes,
            stream,
            ctypes.addressof(pointers),
            0,
        )
        _check(driver, status, f"launching {self.variant.label}")


@functools.cache
def load(variant: Variant, device: int, arch: str) -> Kernel:
    """The kernel, loaded once per device."""
    return Kernel(variant, device, arch)


def arch_of(device: int) -> str:
    """sm_90 and the like."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def run(
    spec: KernelSpec,
    inputs: Sequence[Tensor],
    *,
    outputs: Sequence[Tensor] | None = None,
    tunables: Tunables | None = None,
    arch: str | None = None,
    floats: Mapping[str, float] | None = None,
) -> list[Tensor]:
    """Run `spec` on CUDA tensors and return its outputs, which are allocated unless given.

    `arch` overrides what is compiled for: compute_75 runs the Turing path, as PTX, on a newer GPU.
    """
    # The storage type is that of the first buffer that holds no indices.
    first = next(t for buffer, t in zip(spec.inputs, inputs, strict=True) if buffer.indexes is None)
    dtype = DTYPES.get(first.dtype)
    device = first.device.index
    if not first.is_cuda:
        raise ConfigError(f"{spec.name}: the inputs are on the CPU: move them to a GPU")
    target = arch or arch_of(device)
    if dtype is None or not spec.runs_on(dtype, target.replace("compute_", "sm_")):
        raise KernelError(f"{spec.name} does not run in {first.dtype} on {target}: use one of {', '.join(spec.dtypes)}")
    for buffer, tensor in zip(spec.inputs, inputs, strict=True):
        wanted = first.dtype if buffer.indexes is None else torch.int64
        if tensor.dtype != wanted or tensor.device != first.device or not tensor.is_contiguous():
            raise ConfigError(f"{spec.name}: {buffer.name} must be contiguous, {wanted}, on {first.device}")
    dims = spec.dims_of([tensor.shape for tensor in inputs])
    made = [first.new_empty(buffer.shape(dims)) for buffer in spec.outputs] if outputs is None else list(outputs)
    variant = Variant.of(spec, dtype, dims, tunables)
    values: dict[str, Tensor | float | int] = {**dims, **as_kwargs(spec, floats)}
    buffers = zip((*spec.inputs, *spec.outputs), (*inputs, *made), strict=True)
    values |= {buffer.name: tensor for buffer, tensor in buffers}
    if all(dims.values()):
        load(variant, device, target).launch(spec.launch(dims, dict(variant.tunables), dtype), values)
    return made


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(driver: Any, status: Any, doing: str) -> None:
    result = driver.CUresult
    if status == result.CUDA_SUCCESS:
        return
    too_old = (result.CUDA_ERROR_UNSUPPORTED_PTX_VERSION, result.CUDA_ERROR_NO_BINARY_FOR_GPU)
    remedy = ": the driver is older than the compiler, update it" if status in too_old else ""
    raise KernelError(f"CUDA failed while {doing}: {status.name}{remedy}")
