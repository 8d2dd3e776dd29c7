"""Load a compiled kernel into the current device and launch it on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpline.errors import ConfigError, DeviceError, KernelError
from warpline.kernels import choices, tensor_map
from warpline.kernels.arguments import Buffer, Dims
from warpline.kernels.compile import Program, compile_one
from warpline.kernels.driver import check, current_stream, driver
from warpline.kernels.spec import KernelSpec, Launch, Tunables, Variant

#: Element types in torch.
TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
DTYPES = {kind: name for name, kind in TORCH_TYPES.items()}


class Module:
    """A compiled program on one device."""

    def __init__(self, program: Program, device: int, arch: str, shared_bytes: int):
        self.label, self.device = program.label, device
        cuda = driver()
        binary = compile_one(program, arch)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes sure that torch has set up its context
            status, self._module = cuda.cuModuleLoadData(binary.code)
            check(status, f"loading {program.label} for {arch}")
            status, self._function = cuda.cuModuleGetFunction(self._module, program.entry.encode())
            check(status, f"finding {program.entry}")
            if shared_bytes:  # more than 48 KiB, static and dynamic together, must be requested
                attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = cuda.cuFuncSetAttribute(self._function, attribute, shared_bytes)
                check(status, f"giving {program.label} {shared_bytes:,} bytes of shared memory")

    def read_int(self, name: str) -> int:
        """Return the value of an int variable of the program."""
        cuda = driver()
        status, address, _ = cuda.cuModuleGetGlobal(self._module, name.encode())
        check(status, f"finding {name}")
        value = ctypes.c_int()
        (status,) = cuda.cuMemcpyDtoH(ctypes.addressof(value), address, 4)
        check(status, f"reading {name}")
        return value.value

    def write(self, name: str, tensor: Tensor) -> None:
        """Enqueue a copy of `tensor` into a variable of the program."""
        cuda = driver()
        status, address, room = cuda.cuModuleGetGlobal(self._module, name.encode())
        check(status, f"finding {name}")
        if tensor.nbytes != room:
            raise KernelError(f"{self.label}: {name} has {tensor.nbytes:,} bytes, the program holds {room:,}")
        with torch.cuda.device(self.device):
            (status,) = cuda.cuMemcpyDtoDAsync(address, tensor.data_ptr(), tensor.nbytes, current_stream(self.device))
        check(status, f"writing {name}")

    def require_cooperation(self, shape: Launch) -> None:
        """Raise an error unless all blocks of the launch can run at the same time and wait for one another."""
        cuda = driver()
        kind = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        status, able = cuda.cuDeviceGetAttribute(kind, self.device)
        check(status, "asking for cooperative launches")
        if not able:
            raise DeviceError(f"this GPU cannot launch cooperatively, which {self.label} needs: use --executor graph")
        room = self.resident_blocks(shape)
        if room < shape.grid:
            raise DeviceError(
                f"{self.label} needs {shape.grid} blocks at once, this GPU holds {room}: use --executor graph"
            )

    def resident_blocks(self, shape: Launch) -> int:
        """Return how many blocks of this shape run at the same time on this GPU; whole clusters if the program has
        them."""
        cuda = driver()
        if shape.cluster > 1:
            config = cuda.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = shape.cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = shape.block, 1, 1
            config.sharedMemBytes = shape.shared_bytes
            status, clusters = cuda.cuOccupancyMaxActiveClusters(self._function, config)
            check(status, f"asking how many clusters of {self.label} fit")
            return int(clusters) * shape.cluster
        status, resident = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            self._function, shape.block, shape.shared_bytes
        )
        check(status, f"asking how many blocks of {self.label} fit")
        return int(resident) * torch.cuda.get_device_properties(self.device).multi_processor_count

    def launch(
        self, shape: Launch, pointers: ctypes.Array[Any], *, cooperative: bool = False, overlapping: bool = False
    ) -> None:
        """Enqueue one launch on torch's current stream; `pointers` point to the arguments. The blocks of a cooperative
        launch run at the same time; an overlapping launch may begin before the preceding one has ended."""
        cuda, stream = driver(), current_stream(self.device)
        sizes = (shape.grid, 1, 1, shape.block // shape.teams, shape.teams, 1, shape.shared_bytes, stream)
        at = ctypes.addressof(pointers)
        if overlapping:
            (status,) = cuda.cuLaunchKernelEx(_overlapping(cuda, sizes), self._function, at, 0)
        elif cooperative:
            (status,) = cuda.cuLaunchCooperativeKernel(self._function, *sizes, at)
        else:
            (status,) = cuda.cuLaunchKernel(self._function, *sizes, at, 0)
        check(status, f"launching {self.label}")


class Arguments:
    """A kernel's packed arguments: each in 64-bit words of its own, and the pointers to them that the driver wants."""

    def __init__(self, words: Sequence[int], starts: Sequence[int]):
        self._words = (ctypes.c_uint64 * len(words))(*words)
        first = ctypes.addressof(self._words)
        self.pointers = (ctypes.c_void_p * len(starts))(*(first + 8 * start for start in starts))


class Kernel:
    """One variant, loaded on one device."""

    def __init__(self, variant: Variant, device: int, arch: str):
        self._module = Module(variant, device, arch, variant.smallest_launch.shared_bytes)
        self._overlapping = variant.overlapping
        self._held: dict[str, tuple[Any, int]] = {}  # the tensor last copied to constant memory, and its version

    def launch(self, shape: Launch, arguments: Arguments, constants: Mapping[str, Tensor]) -> None:
        """Enqueue one launch; `constants` are the tensors for constant memory, by name."""
        for name, tensor in constants.items():
            held, version = self._held.get(name, (None, 0))
            if held is not tensor or version != tensor._version:  # not copied again if unchanged
                self._module.write(name, tensor)
                self._held[name] = tensor, tensor._version
        self._module.launch(shape, arguments.pointers, overlapping=self._overlapping)


@functools.cache
def load(variant: Variant, device: int, arch: str) -> Kernel:
    """Return the kernel, loaded once per device."""
    return Kernel(variant, device, arch)


def arch_of(device: int) -> str:
    """Return the compute capability, such as sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class Packing:
    """The word layout of a variant's arguments: which tensor and whether with strides, or the value of a number."""

    def __init__(self, variant: Variant, numbers: Mapping[str, float]):
        spec = variant.spec
        places = {buffer.name: at for at, buffer in enumerate([*spec.inputs, *spec.outputs, *spec.scratches])}
        self._places: list[tuple[int, bool, int]] = []  # index of the tensor or -1, strided, word
        self._tiles: dict[int, int] = {}  # rows per tile of arguments that are read in tiles
        self._starts: list[int] = []
        words = 0
        for argument in variant.parameters():
            self._starts.append(words)
            if isinstance(argument, Buffer) and argument.tiled_by is not None:
                self._tiles[len(self._places)] = dict(variant.tunables)[argument.tiled_by]
                self._places.append((places[argument.name], False, 0))
                words += tensor_map.WORDS
            elif isinstance(argument, Buffer):
                self._places.append((places[argument.name], argument.strided, 0))
                words += 4 if argument.strided else 1  # `View` of common.cuh
            else:
                self._places.append((-1, False, _word(numbers[argument.name], is_int=argument.is_int)))
                words += 1
        #: Tensors to copy into constant memory: their indices by name.
        self.constants = {buffer.name: places[buffer.name] for buffer in variant.in_constant_memory}

    def pack(self, tensors: Sequence[Tensor]) -> Arguments:
        """Pack the arguments of a launch; `tensors` are inputs, outputs and scratch, in this order."""
        words: list[int] = []
        for i, (at, strided, word) in enumerate(self._places):
            if i in self._tiles:
                words += tensor_map.words(tensors[at], self._tiles[i])
                continue
            words.append(tensors[at].data_ptr() if at >= 0 else word)
            if strided:
                words += tensors[at].stride()[:3]
        return Arguments(words, self._starts)


def tunables_of(
    spec: KernelSpec, dtype: str, dims: Dims, device: int, arch: str | None = None, *, invariant: bool = False
) -> Tunables:
    """Return the tunables that a launch uses on a device unless they are given: the stored best ones, or the default.

    The default is used if `arch` is not the GPU's own, because choices were timed with its own code, and for
    `invariant` launches, because choices consider speed only."""
    own = arch_of(device)
    asks = arch in (None, own) and not invariant
    found = choices.stored(spec, dtype, dims, torch.cuda.get_device_name(device)) if asks else None
    return spec.tunables_for(dims, dtype, arch or own, invariant=invariant) if found is None else found


class Plan:
    """One op for tensors of given layouts: checked, with variant, launch shape and argument layout. Tunables that are
    not given are the stored best ones for this GPU, or the default.

    Overlapping launches begin before the preceding one has ended, where the GPU can. Invariant ones use tunables with
    which a row's bits do not depend on the number of rows.
    """

    def __init__(
        self,
        spec: KernelSpec,
        inputs: Sequence[Tensor],
        *,
        tunables: Tunables | None = None,
        arch: str | None = None,
        numbers: Mapping[str, float | None] | None = None,
        overlapping: bool = False,
        invariant: bool = False,
    ):
        own = [tensor for buffer, tensor in zip(spec.inputs, inputs, strict=True) if not buffer.pinned]
        first = own[0] if spec.storage is None else inputs[spec.storage]
        if not first.is_cuda:
            raise ConfigError(f"{spec.name}: the inputs are on the CPU: move them to a GPU")
        dtype = spec.dtypes[0] if spec.storage is None else DTYPES.get(first.dtype)
        self._device = first.device.index
        self._target = arch or arch_of(self._device)
        if dtype is None or not spec.runs_on(dtype, self._target):
            kinds, archs = ", ".join(spec.dtypes), f", on {' or '.join(spec.archs)}" if spec.archs else ""
            raise KernelError(f"{spec.name} does not run in {first.dtype} on {self._target}: use {kinds}{archs}")
        for buffer, tensor in zip(spec.inputs, inputs, strict=True):
            _require(spec, buffer, tensor, TORCH_TYPES[buffer.element(dtype)], first.device)
        dims = spec.dims_of([tensor.shape for tensor in inputs])
        if tunables is None:
            tunables = tunables_of(spec, dtype, dims, self._device, self._target, invariant=invariant)
        self._variant = Variant.of(spec, dtype, dims, self._target, tunables, overlapping=overlapping)
        self.empty = not all(dims.values())
        if not self.empty:
            self._shape = self._variant.launch(dims)
        extended = {**dims, **dict(self._variant.tunables)}
        self._results = [(b.shape(dims), TORCH_TYPES[b.element(dtype)]) for b in spec.outputs]
        self._working = [(b.shape(extended), TORCH_TYPES[b.element(dtype)]) for b in spec.scratches]
        self._packing = Packing(self._variant, {**dims, **spec.number_values(dims, numbers)})

    @property
    def program(self) -> tuple[Variant, str]:
        """The variant to compile, and the arch."""
        return self._variant, self._target

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The kernel, loaded at the first use."""
        return load(self._variant, self._device, self._target)

    def prepare(self) -> None:
        """Load the kernel now, so that the first launch takes no longer than later ones."""
        if not self.empty:
            _ = self.kernel

    def outputs(self) -> list[Tensor]:
        """Allocate the outputs."""
        return [torch.empty(shape, dtype=kind, device=self._device) for shape, kind in self._results]

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that launches the op on these tensors. Requires: they have the layouts of the plan."""
        if self.empty:
            return lambda: None
        working = [torch.zeros(shape, dtype=kind, device=self._device) for shape, kind in self._working]
        tensors = [*inputs, *outputs, *working]
        arguments, shape = self._packing.pack(tensors), self._shape
        constants = {name: tensors[at] for name, at in self._packing.constants.items()}

        def launch(_kept: list[Tensor] = tensors) -> None:
            self.kernel.launch(shape, arguments, constants)

        return launch


#: Plans by op, layouts and options: making one takes a hundred times as long as a launch.
_plans: dict[Any, Plan] = {}
MOST_PLANS = 4096


def plan_for(
    spec: KernelSpec,
    inputs: Sequence[Tensor],
    *,
    tunables: Tunables | None = None,
    numbers: Mapping[str, float | None] | None = None,
    **options: Any,
) -> Plan:
    """Return the plan for tensors of these layouts, made at the first use. The layers of a model share one."""
    layouts = [(t.shape, t.stride(), t.storage_offset() % 16, t.dtype, t.device) for t in inputs]
    named = [*(numbers or {}).items(), *(tunables or {}).items(), *options.items()]
    key = (spec, tunables is None, *layouts, *named)
    if (plan := _plans.get(key)) is None:
        plan = Plan(spec, inputs, tunables=tunables, numbers=numbers, **options)
        if len(_plans) >= MOST_PLANS:
            _plans.pop(next(iter(_plans)), None)
        _plans[key] = plan
    return plan


class Call:
    """One op on given tensors, ready to be launched any number of times. Options are those of `Plan`."""

    def __init__(
        self, spec: KernelSpec, inputs: Sequence[Tensor], *, outputs: Sequence[Tensor] | None = None, **options: Any
    ):
        plan = plan_for(spec, inputs, **options)
        self.program, self.prepare = plan.program, plan.prepare
        self.outputs = plan.outputs() if outputs is None else list(outputs)
        #: Enqueues one launch.
        self.launch = plan.bind(inputs, self.outputs)


def run(
    spec: KernelSpec,
    inputs: Sequence[Tensor],
    *,
    outputs: Sequence[Tensor] | None = None,
    tunables: Tunables | None = None,
    numbers: Mapping[str, float | None] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Run `spec` on CUDA tensors and return its outputs, which are allocated unless given. Options are those of `Plan`:
    `arch` overrides the target (compute_75 runs the Turing path, as PTX, on a newer GPU).
    """
    plan = plan_for(spec, inputs, tunables=tunables, numbers=numbers, **options)
    results = plan.outputs() if outputs is None else list(outputs)
    plan.bind(inputs, results)()
    return results


def forget() -> None:
    """Drop all plans and cached choices, so that those stored now are used."""
    choices.forget()
    _plans.clear()


def _word(value: float, *, is_int: bool) -> int:
    """Return a number as the first four bytes of a word."""
    packed = struct.pack("<i", int(value)) if is_int else struct.pack("<f", float(value))
    return int.from_bytes(packed, "little")


def _require(spec: KernelSpec, buffer: Buffer, tensor: Tensor, kind: torch.dtype, device: torch.device) -> None:
    here = tensor.device == device or (buffer.pinned and tensor.is_pinned())
    if tensor.dtype != kind or not here or not (buffer.strided or tensor.is_contiguous()):
        raise ConfigError(f"{spec.name}: {buffer.name} must be contiguous, {kind}, on {device}")
    if buffer.strided and tensor.dim() == 4 and not _is_vectorised(tensor):
        raise ConfigError(
            f"{spec.name}: {buffer.name} must be contiguous in its last dimension, and its rows as aligned as their "
            "length allows, up to 16 bytes: call .contiguous() on it"
        )


def _is_vectorised(tensor: Tensor) -> bool:
    """Whether every row is aligned for the vector width that `vector_width` of common.cuh chooses."""
    size, columns = tensor.element_size(), tensor.shape[-1]
    width = next(w for w in (16 // size, 8 // size, 4 // size, 1) if w and columns % w == 0)
    starts = [
        tensor.storage_offset(),
        *(s for s, n in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if n > 1),
    ]
    return (tensor.stride(-1) == 1 or columns == 1) and all(start % width == 0 for start in starts)


def _overlapping(cuda: Any, sizes: Sequence[int]) -> Any:
    """Return the configuration of an overlapping launch."""
    config, attribute = cuda.CUlaunchConfig(), cuda.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = sizes[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = sizes[3:6]
    config.sharedMemBytes, config.hStream = sizes[6:]
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config
