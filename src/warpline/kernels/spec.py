"""`KernelSpec`: everything there is to know about one op, said once.

Translation unit, argument packing, output buffers, byte counts, tests, bench rows and the torch op all follow from
it. An op is a device function template in `cuda/ops/` and one entry in `catalog.py`; nothing else names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warpline.config import DTYPE_BYTES
from warpline.errors import ConfigError
from warpline.hardware import arch_supports

if TYPE_CHECKING:
    from torch import Tensor

Dims = Mapping[str, int]
Tunables = Mapping[str, int]

#: Element types in CUDA C++.
CUDA_TYPES = {"fp32": "float", "fp16": "__half", "bf16": "__nv_bfloat16"}
INDEX_BYTES = 8
THREADS_PER_WARP = 32


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor argument; `dims` names its extents. Its elements are of the storage type, or 64-bit indices."""

    name: str
    dims: tuple[str, ...]
    written: bool = False
    #: The dimension into which it holds indices, if it holds indices.
    indexes: str | None = None
    #: The dimension whose extent says how many of its rows are read, if not all are.
    gathered_by: str | None = None

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Its extents for given dimensions."""
        return tuple(dims[name] for name in self.dims)

    def bytes(self, dims: Dims, dtype: str) -> int:
        """What a kernel moves of it: everything once, or the rows it gathers."""
        extents = list(self.shape(dims))
        if self.gathered_by is not None:
            extents[0] = min(extents[0], dims[self.gathered_by])  # a row asked for twice need not move twice
        return math.prod(extents) * (DTYPE_BYTES[dtype] if self.indexes is None else INDEX_BYTES)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number argument: a dimension, passed as int, or a float with its usual value."""

    name: str
    default: float | None = None

    @property
    def is_dimension(self) -> bool:
        """Whether the value is a dimension of the op."""
        return self.default is None


def reads(name: str, dims: str, *, indexes: str | None = None, gathered_by: str | None = None) -> Buffer:
    """An input, its dimensions named in one string."""
    return Buffer(name, tuple(dims.split()), indexes=indexes, gathered_by=gathered_by)


def writes(name: str, dims: str) -> Buffer:
    """An output."""
    return Buffer(name, tuple(dims.split()), written=True)


@dataclass(frozen=True, slots=True)
class Launch:
    """Shape of a launch."""

    grid: int
    block: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSpec:
    """One op. Functions take the dimensions by name, and where it matters the tunables and the dtype.

    There is one object per op, so identity is equality.
    """

    name: str
    summary: str
    header: str  # under cuda/
    arguments: tuple[Buffer | Scalar, ...]
    #: Dimensions compiled in, as template constants in capitals, behind the type and before the tunables.
    constants: tuple[str, ...] = ()
    #: Choices of each tunable.
    tunables: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: The choice made without a sweep.
    default: Callable[[Dims], Tunables]
    launch: Callable[[Dims, Tunables, str], Launch]
    flops: Callable[[Dims], int]
    #: The op in torch, in whatever precision the inputs have; takes inputs and float scalars, returns the outputs.
    reference: Callable[..., tuple[Tensor, ...]]
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    #: Error that the op makes on purpose, relative to its largest result.
    approximation: float = 0.0
    test_dims: tuple[Dims, ...]
    bench_dims: tuple[Dims, ...]

    @property
    def inputs(self) -> list[Buffer]:
        """Buffers that are read."""
        return [a for a in self.arguments if isinstance(a, Buffer) and not a.written]

    @property
    def outputs(self) -> list[Buffer]:
        """Buffers that are written."""
        return [a for a in self.arguments if isinstance(a, Buffer) and a.written]

    @property
    def floats(self) -> list[Scalar]:
        """Numbers that are no dimensions."""
        return [a for a in self.arguments if isinstance(a, Scalar) and not a.is_dimension]

    def bytes(self, dims: Dims, dtype: str) -> int:
        """What must move: every buffer once."""
        return sum(buffer.bytes(dims, dtype) for buffer in self.inputs + self.outputs)

    def dims_of(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Dimensions from the shapes of the inputs, in order; a contradiction is named."""
        dims: dict[str, int] = {}
        for buffer, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(buffer.dims):
                wanted = ", ".join(buffer.dims)
                raise ConfigError(f"{self.name}: {buffer.name} has {len(shape)} dimensions, expected ({wanted})")
            for name, extent in zip(buffer.dims, shape, strict=True):
                if dims.setdefault(name, extent) != extent:
                    raise ConfigError(f"{self.name}: {buffer.name} has {name}={extent}, elsewhere it is {dims[name]}")
        return dims

    def runs_on(self, dtype: str, arch: str) -> bool:
        """Whether the op exists in `dtype` for `arch`."""
        return dtype in self.dtypes and arch_supports(arch, dtype)


@dataclass(frozen=True, slots=True)
class Variant:
    """A spec made concrete: dtype, compiled-in dimensions, tunables. What is compiled and cached."""

    spec: KernelSpec
    dtype: str
    constants: tuple[tuple[str, int], ...]
    tunables: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, spec: KernelSpec, dtype: str, dims: Dims, tunables: Tunables | None = None) -> Variant:
        """The variant for given dimensions, with the default tunables unless others are given."""
        chosen = spec.default(dims) if tunables is None else tunables
        if set(chosen) != set(spec.tunables):
            raise ConfigError(
                f"{spec.name}: tunables are {', '.join(spec.tunables) or 'none'}, not {', '.join(chosen)}"
            )
        constants = tuple((name, dims[name]) for name in spec.constants)
        return cls(spec, dtype, constants, tuple((name, chosen[name]) for name in spec.tunables))

    @property
    def entry(self) -> str:
        """The kernel's name in the GPU's and everybody's traces."""
        return f"warpline_{self.spec.name}"

    @property
    def label(self) -> str:
        """For people."""
        numbers = " ".join(f"{name}={value}" for name, value in (*self.constants, *self.tunables))
        return f"{self.spec.name} {self.dtype} {numbers}".strip()

    @property
    def block(self) -> int:
        """Threads per block, for the compiler to plan registers with."""
        return self.spec.launch({**_ones(self.spec), **dict(self.constants)}, dict(self.tunables), self.dtype).block

    def translation_unit(self) -> str:
        """The CUDA C++ that instantiates the op: one kernel, nothing else."""
        spec, kind = self.spec, CUDA_TYPES[self.dtype]
        fixed = dict(self.constants)
        parameters, passed = [], []
        for argument in spec.arguments:
            if isinstance(argument, Buffer):
                element = kind if argument.indexes is None else "long long"
                parameters.append(f"{'' if argument.written else 'const '}{element}* __restrict__ {argument.name}")
            elif argument.name in fixed:
                continue
            else:
                parameters.append(f"{'int' if argument.is_dimension else 'float'} {argument.name}")
            passed.append(argument.name)
        values = [kind, *(str(value) for _, value in (*self.constants, *self.tunables))]
        return "\n".join(
            [
                f"// {self.label}",
                f'#include "{spec.header}"',
                f'extern "C" __global__ void __launch_bounds__({self.block}, 1)',
                f"{self.entry}({', '.join(parameters)}) {{",
                f"    warpline::{spec.name}<{', '.join(values)}>({', '.join(passed)});",
                "}\n",
            ]
        )


def _ones(spec: KernelSpec) -> dict[str, int]:
    return {name: 1 for a in spec.arguments if isinstance(a, Buffer) for name in a.dims}


def as_kwargs(spec: KernelSpec, given: Mapping[str, float] | None) -> dict[str, Any]:
    """The float scalars of a call, with defaults; unknown ones are errors."""
    values = {scalar.name: scalar.default for scalar in spec.floats}
    for name, value in (given or {}).items():
        if name not in values:
            raise ConfigError(f"{spec.name} has no number called '{name}': {', '.join(values) or 'it takes none'}")
        values[name] = value
    return values
