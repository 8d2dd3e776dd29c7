"""Load a compiled kernel into the current device and launch it on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpline.errors import ConfigError, DeviceError, KernelError
from warpline.kernels import choices
from warpline.kernels.compile import Program, compile_one, nvrtc_version
from warpline.kernels.spec import Buffer, Dims, KernelSpec, Launch, Tunables, Variant

#: Element types in torch.
TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
_NAMES = {kind: name for name, kind in TORCH_TYPES.items()}


class Module:
    """A compiled program on one device."""

    def __init__(self, program: Program, device: int, arch: str, shared_bytes: int):
        self.label, self.device = program.label, device
        driver = _driver()
        binary = compile_one(program, arch)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes sure that torch has set up its context
            status, self._module = driver.cuModuleLoadData(binary.code)
            _check(driver, status, f"loading {program.label} for {arch}")
            status, self._function = driver.cuModuleGetFunction(self._module, program.entry.encode())
            _check(driver, status, f"finding {program.entry}")
            if shared_bytes:  # beyond 48 KiB, static and dynamic together, a block only gets what was asked for
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)
                _check(driver, status, f"giving {program.label} {shared_bytes:,} bytes of shared memory")

    def read_int(self, name: str) -> int:
        """A number that the program carries."""
        driver = _driver()
        status, address, _ = driver.cuModuleGetGlobal(self._module, name.encode())
        _check(driver, status, f"finding {name}")
        value = ctypes.c_int()
        (status,) = driver.cuMemcpyDtoH(ctypes.addressof(value), address, 4)
        _check(driver, status, f"reading {name}")
        return value.value

    def write(self, name: str, tensor: Tensor) -> None:
        """Enqueue a copy of `tensor` into memory that the program carries."""
        driver = _driver()
        status, address, room = driver.cuModuleGetGlobal(self._module, name.encode())
        _check(driver, status, f"finding {name}")
        if tensor.nbytes != room:
            raise KernelError(f"{self.label}: {name} has {tensor.nbytes:,} bytes, the program holds {room:,}")
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with torch.cuda.device(self.device):
            (status,) = driver.cuMemcpyDtoDAsync(address, tensor.data_ptr(), tensor.nbytes, stream)
        _check(driver, status, f"writing {name}")

    def require_cooperation(self, shape: Launch) -> None:
        """Whether so many blocks can wait for one another; if not, say why."""
        driver = _driver()
        kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        status, able = driver.cuDeviceGetAttribute(kind, self.device)
        _check(driver, status, "asking for cooperative launches")
        if not able:
            raise DeviceError(f"this GPU cannot launch cooperatively, which {self.label} needs: use --executor graph")
        status, resident = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            self._function, shape.block, shape.shared_bytes
        )
        _check(driver, status, f"asking how many blocks of {self.label} fit")
        room = resident * torch.cuda.get_device_properties(self.device).multi_processor_count
        if room < shape.grid:
            raise DeviceError(
                f"{self.label} needs {shape.grid} blocks at once, this GPU holds {room}: use --executor graph"
            )

    def launch(
        self, shape: Launch, pointers: ctypes.Array[Any], *, cooperative: bool = False, overlapping: bool = False
    ) -> None:
        """Enqueue one launch on torch's current stream; `pointers` lead to the arguments. A cooperative launch's blocks
        run all at once; an overlapping launch may begin before the one ahead of it has ended."""
        driver = _driver()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        sizes = (shape.grid, 1, 1, shape.block, 1, 1, shape.shared_bytes, stream)
        at = ctypes.addressof(pointers)
        if overlapping:
            (status,) = driver.cuLaunchKernelEx(_overlapping(driver, sizes), self._function, at, 0)
        elif cooperative:
            (status,) = driver.cuLaunchCooperativeKernel(self._function, *sizes, at)
        else:
            (status,) = driver.cuLaunchKernel(self._function, *sizes, at, 0)
        _check(driver, status, f"launching {self.label}")


class Kernel:
    """One variant, loaded on one device."""

    def __init__(self, variant: Variant, device: int, arch: str):
        self._module = Module(variant, device, arch, variant.smallest_launch.shared_bytes)
        self._parameters, self._overlapping = variant.parameters(), variant.overlapping
        self._constants = [buffer.name for buffer in variant.in_constant_memory]
        self._held: dict[str, tuple[Any, int]] = {}  # what constant memory was filled from, and its version

    def launch(self, shape: Launch, values: Mapping[str, Tensor | float | int]) -> None:
        """Enqueue one launch; `values` holds every argument by name."""
        for name in self._constants:
            tensor = values[name]
            assert isinstance(tensor, Tensor)
            held, version = self._held.get(name, (None, 0))
            if held is not tensor or version != tensor._version:  # the same as last time need not travel again
                self._module.write(name, tensor)
                self._held[name] = tensor, tensor._version
        cells = [_cell(argument, values[argument.name]) for argument in self._parameters]
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        self._module.launch(shape, pointers, overlapping=self._overlapping)


def _cell(argument: Any, value: Tensor | float | int) -> Any:
    """The argument as the kernel takes it."""
    if isinstance(argument, Buffer):
        assert isinstance(value, Tensor)
        if argument.strided:  # `View` of common.cuh
            return (ctypes.c_int64 * 4)(value.data_ptr(), *value.stride()[:3])
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(int(value)) if argument.is_int else ctypes.c_float(float(value))


@functools.cache
def load(variant: Variant, device: int, arch: str) -> Kernel:
    """The kernel, loaded once per device."""
    return Kernel(variant, device, arch)


def arch_of(device: int) -> str:
    """sm_90 and the like."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def allocate(buffers: Sequence[Buffer], dims: Dims, dtype: str, device: torch.device | int | str) -> list[Tensor]:
    """Memory for outputs or scratch; what counts starts at zero."""
    return [
        (torch.empty if buffer.role == "output" else torch.zeros)(
            buffer.shape(dims), dtype=TORCH_TYPES[buffer.element(dtype)], device=device
        )
        for buffer in buffers
    ]


class Call:
    """One op on given tensors, checked and ready to be launched any number of times. Tunables that are not given are
    those that a sweep found best on this GPU, or the default's.

    Overlapping launches begin before the launch ahead of them has ended, where the GPU can.
    """

    def __init__(
        self,
        spec: KernelSpec,
        inputs: Sequence[Tensor],
        *,
        outputs: Sequence[Tensor] | None = None,
        tunables: Tunables | None = None,
        arch: str | None = None,
        numbers: Mapping[str, float | None] | None = None,
        overlapping: bool = False,
    ):
        first = inputs[spec.storage]
        if not first.is_cuda:
            raise ConfigError(f"{spec.name}: the inputs are on the CPU: move them to a GPU")
        dtype, device = _NAMES.get(first.dtype), first.device.index
        target = arch or arch_of(device)
        if dtype is None or not spec.runs_on(dtype, target):
            kinds = ", ".join(spec.dtypes)
            raise KernelError(f"{spec.name} does not run in {first.dtype} on {target}: use one of {kinds}")
        for buffer, tensor in zip(spec.inputs, inputs, strict=True):
            _require(spec, buffer, tensor, TORCH_TYPES[buffer.element(dtype)], first.device)
        dims = spec.dims_of([tensor.shape for tensor in inputs])
        if tunables is None and target == arch_of(device):  # a sweep's choice is for a GPU's own code
            tunables = choices.stored(spec, dtype, dims, torch.cuda.get_device_name(device))
        self._variant = Variant.of(spec, dtype, dims, target, tunables, overlapping=overlapping)
        self._device, self._target = device, target
        self._empty = not all(dims.values())
        if not self._empty:
            self._shape = self._variant.launch(dims)
            extended = {**dims, **dict(self._variant.tunables)}
            scratch = allocate(spec.scratches, extended, dtype, device)
        else:
            scratch = []
        self.outputs = allocate(spec.outputs, dims, dtype, device) if outputs is None else list(outputs)
        self._values: dict[str, Any] = {**dims, **spec.number_values(dims, numbers)}
        for buffers, tensors in ((spec.inputs, inputs), (spec.outputs, self.outputs), (spec.scratches, scratch)):
            self._values |= {buffer.name: tensor for buffer, tensor in zip(buffers, tensors, strict=False)}

    @property
    def program(self) -> tuple[Variant, str]:
        """What is compiled for it, and for which GPU."""
        return self._variant, self._target

    def prepare(self) -> None:
        """Load the kernel now, so that launching takes no longer the first time than later."""
        if not self._empty:
            load(self._variant, self._device, self._target)

    def launch(self) -> None:
        """Enqueue it."""
        if not self._empty:
            load(self._variant, self._device, self._target).launch(self._shape, self._values)


def run(spec: KernelSpec, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Run `spec` on CUDA tensors and return its outputs, which are allocated unless given. Options are those of `Call`:
    `arch` overrides what is compiled for (compute_75 runs the Turing path, as PTX, on a newer GPU).
    """
    call = Call(spec, inputs, **options)
    call.launch()
    return call.outputs


def _require(spec: KernelSpec, buffer: Buffer, tensor: Tensor, kind: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != kind or tensor.device != device or not (buffer.strided or tensor.is_contiguous()):
        raise ConfigError(f"{spec.name}: {buffer.name} must be contiguous, {kind}, on {device}")
    if buffer.strided and tensor.dim() == 4 and not _is_vectorised(tensor):
        raise ConfigError(
            f"{spec.name}: {buffer.name} must be contiguous in its last dimension, and its rows as aligned as their "
            "length allows, up to 16 bytes: call .contiguous() on it"
        )


def _is_vectorised(tensor: Tensor) -> bool:
    """Whether every row starts where vectors of the width that `vector_width` of common.cuh chooses may start."""
    size, columns = tensor.element_size(), tensor.shape[-1]
    width = next(w for w in (16 // size, 8 // size, 4 // size, 1) if w and columns % w == 0)
    starts = [
        tensor.storage_offset(),
        *(s for s, n in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if n > 1),
    ]
    return (tensor.stride(-1) == 1 or columns == 1) and all(start % width == 0 for start in starts)


def _overlapping(driver: Any, sizes: Sequence[int]) -> Any:
    """How such a launch is described."""
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = sizes[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = sizes[3:6]
    config.sharedMemBytes, config.hStream = sizes[6:]
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(driver: Any, status: Any, doing: str) -> None:
    result = driver.CUresult
    if status == result.CUDA_SUCCESS:
        return
    remedy = ""
    if status in (
        result.CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        result.CUDA_ERROR_NO_BINARY_FOR_GPU,
        result.CUDA_ERROR_INVALID_IMAGE,
    ):
        _, version = driver.cuDriverGetVersion()
        supported = f"{version // 1000}.{version % 1000 // 10}"
        remedy = f": the driver supports CUDA {supported} and the compiler is {nvrtc_version()}: update the driver"
        remedy += f", or install the nvidia-cuda-nvrtc of CUDA {supported}"
    raise KernelError(f"CUDA failed while {doing}: {status.name}{remedy}")
