"""What a kernel takes: buffers and numbers, and how the device declares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from warpline.config import DTYPE_BYTES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Dims = Mapping[str, int]

#: Element types in CUDA C++: the storage types, and what else a buffer may hold.
CUDA_TYPES = {
    "fp32": "float",
    "fp16": "__half",
    "bf16": "__nv_bfloat16",
    "int8": "signed char",
    "int32": "int",
    "int64": "long long",
    "bool": "bool",
}
ELEMENT_BYTES = {**DTYPE_BYTES, "int8": 1, "int32": 4, "int64": 8, "bool": 1}


@dataclass(frozen=True, slots=True)
class Values:
    """What a buffer holds: its element type, and what a test may put there. Plain numbers of the storage type unless
    it says otherwise."""

    #: Element type, or None for the storage type of the variant.
    element: str | None = None
    #: Integers from `lowest` to the extent of a dimension, inclusive where `lowest` is 1 (counts), else exclusive.
    upto: str | None = None
    lowest: int = 0
    #: Whether a test takes them as they are: what follows from them in steps, as codes do, is not moved by rounding.
    exact: bool = False
    #: Floats between two bounds instead of normally distributed ones.
    between: tuple[float, float] | None = None
    #: Where no range says it: a function of the dimensions and, under their names, the tunables, which draws with a
    #: generator of the CPU, or, asked for all that there may be, makes the largest and most regular case.
    made: Callable[[Dims, torch.Generator, bool], Tensor] | None = None


def index_into(dimension: str) -> Values:
    """Indices into a dimension."""
    return Values("int64", upto=dimension)


def count_of(dimension: str) -> Values:
    """How many of a dimension's entries count, at least one."""
    return Values("int64", upto=dimension, lowest=1)


def distinct(count: str, dimension: str) -> Values:
    """So many indices into a dimension, no two the same."""

    def made(dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
        import torch

        return torch.randperm(dims[dimension], generator=generator)[: dims[count]]

    return Values("int64", made=made)


def between(low: float, high: float) -> Values:
    """float32 numbers between two bounds, whatever the storage type."""
    return Values("fp32", between=(low, high))


def often(value: float, low: float, high: float, shape: str) -> Values:
    """As `between`, but about half of them are `value`: the case that a kernel may treat as a special one. The largest
    case of all, which is timed, has none of these."""

    def made(dims: Dims, generator: torch.Generator, full: bool) -> Tensor:
        import torch

        count = dims[shape]
        numbers = low + (high - low) * torch.rand(count, generator=generator)
        usual = torch.rand(count, generator=generator) < (0.0 if full else 0.5)
        return numbers.masked_fill(usual, value)

    return Values("fp32", made=made)


STORAGE = Values()
#: Of the storage type, to be rounded to codes (codes.py).
TO_CODES = Values(exact=True)
FLOAT = Values("fp32")
HALF = Values("fp16")
BITS = Values("int32")
LONG_BITS = Values("int64")
FLAG = Values("bool")
CODES = Values("int8")
#: Of codes; such that what they stand for is of the size of plain test numbers.
SCALES = between(0.0, 0.03)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor argument; `dims` names its extents, or states them."""

    name: str
    dims: tuple[str, ...]
    #: "input", "output", "updated" (an input that the op changes in part), "constant" (an input that is copied into the
    #: module's constant memory), or "scratch": zero at first, left zero where it counts, otherwise any value.
    role: str = "input"
    holds: Values = STORAGE
    #: The extents of what an op touches of it, if that may be less than all: rows that are looked up, say.
    touched: tuple[str, ...] | None = None
    #: Four dimensions, of which all but the last may be strided: the device gets a View instead of a pointer.
    strided: bool = False
    #: The tunable that says how many rows a tile has, where the hardware copies tiles: the device gets a TensorMap.
    tiled_by: str | None = None
    #: Whether it may lie in pinned memory of the host: what a launch reads or writes once need not be copied.
    pinned: bool = False

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Its extents for given dimensions."""
        return tuple(extent_of(name, dims) for name in self.dims)

    def element(self, dtype: str) -> str:
        """Name of its element type, in a variant that stores `dtype`."""
        return self.holds.element or dtype

    def bytes(self, dims: Dims, dtype: str) -> int:
        """What a kernel moves of it: what it touches, once, even if it asks for it twice."""
        touched = (extent_of(name, dims) for name in self.touched or self.dims)
        return min(math.prod(self.shape(dims)), math.prod(touched)) * ELEMENT_BYTES[self.element(dtype)]

    def definition(self, dtype: str, dims: Dims) -> str:
        """The constant memory that holds it."""
        kind, count = CUDA_TYPES[self.element(dtype)], math.prod(self.shape(dims))
        return f"__constant__ __align__(16) {kind} {self.name}[{count}];"

    def declaration(self, dtype: str, *, overlapping: bool) -> str:
        """The kernel parameter. What is promised to be nobody else's is read at any time: there is no promise about
        scratch, which other blocks write, nor in a launch that begins before the one ahead of it has written."""
        kind = CUDA_TYPES[self.element(dtype)]
        if self.strided:
            return f"const warpline::View<{kind}> {self.name}"
        if self.tiled_by is not None:
            return f"const __grid_constant__ warpline::TensorMap {self.name}"
        promise = "" if overlapping or self.role == "scratch" else "__restrict__ "
        return f"{'const ' if self.role == 'input' else ''}{kind}* {promise}{self.name}"


def extent_of(name: str, dims: Dims) -> int:
    """Of a dimension that is named, stated, or follows from one: "rows", "1", "depth+2", "columns/8"."""
    base, _, divisor = name.partition("/")
    base, _, more = base.partition("+")
    return (int(base) if base.isdigit() else dims[base]) // int(divisor or 1) + int(more or 0)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number argument: a dimension or tunable of that name, or a number of its own with its usual value."""

    name: str
    default: float | Callable[[Dims], float] | None = None

    @property
    def is_dimension(self) -> bool:
        """Whether the value is a dimension of the op."""
        return self.default is None

    @property
    def is_int(self) -> bool:
        """Whether the device takes it as an int."""
        return self.is_dimension or isinstance(self.default, int)


@dataclass(frozen=True, slots=True)
class Absent:
    """An argument of the device function that this op does without, and what is passed in its place."""

    name: str
    value: str = "nullptr"


def reads(name: str, dims: str, holds: Values = STORAGE, *, touched: str | None = None) -> Buffer:
    """An input, its dimensions named in one string."""
    return Buffer(name, tuple(dims.split()), holds=holds, touched=None if touched is None else tuple(touched.split()))


def matrix(name: str, dims: str, *, coded: bool, touched: str | None = None) -> tuple[Buffer, Buffer | Absent]:
    """A matrix and, where it is int8 codes, the scale of each of its rows."""
    if not coded:
        return reads(name, dims, touched=touched), Absent("scale")
    rows = dims.split()[0]
    scale = reads("scale", rows, SCALES, touched=None if touched is None else touched.split()[0])
    return reads(name, dims, CODES, touched=touched), scale


def pinned(buffer: Buffer) -> Buffer:
    """The same, but it may lie in pinned memory of the host."""
    return replace(buffer, pinned=True)


def tiles(name: str, dims: str, rows: str) -> Buffer:
    """A matrix that is read in tiles of so many rows."""
    return Buffer(name, tuple(dims.split()), tiled_by=rows)


def views(name: str, dims: str, holds: Values = STORAGE, *, touched: str | None = None) -> Buffer:
    """An input that may be strided."""
    return replace(reads(name, dims, holds, touched=touched), strided=True)


def updates(
    name: str, dims: str, holds: Values = STORAGE, *, touched: str | None = None, strided: bool = False
) -> Buffer:
    """An input of which the op changes a part."""
    parts = None if touched is None else tuple(touched.split())
    return Buffer(name, tuple(dims.split()), "updated", holds, parts, strided)


def writes(name: str, dims: str, holds: Values = STORAGE) -> Buffer:
    """An output."""
    return Buffer(name, tuple(dims.split()), "output", holds)


def scratch(name: str, dims: str, holds: Values = FLOAT) -> Buffer:
    """Working memory; its dimensions may be tunables."""
    return Buffer(name, tuple(dims.split()), "scratch", holds)
