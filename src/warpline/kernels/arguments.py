"""The arguments of a kernel: buffers and numbers, and their declarations in device code."""

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

#: Element types in CUDA C++: the storage types, and the other types that a buffer may hold.
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
    """The contents of a buffer: its element type, and the values that a test puts there. By default normally
    distributed values of the storage type."""

    #: Element type, or None for the storage type of the variant.
    element: str | None = None
    #: Integers from `lowest` to the extent of this dimension, inclusive where `lowest` is 1 (counts), else exclusive.
    upto: str | None = None
    lowest: int = 0
    #: Whether a test perturbs none of them: results such as codes are steps of the input, which rounding does not
    #: shift.
    exact: bool = False
    #: Floats between two bounds instead of normally distributed ones.
    between: tuple[float, float] | None = None
    #: For other cases: a function of the dimensions and the tunables (by name), a CPU generator, and whether to make
    #: the largest and most regular case.
    made: Callable[[Dims, torch.Generator, bool], Tensor] | None = None


def index_into(dimension: str) -> Values:
    """Return values that are indices into a dimension."""
    return Values("int64", upto=dimension)


def count_of(dimension: str) -> Values:
    """Return values that are counts: at least 1, at most the extent of a dimension."""
    return Values("int64", upto=dimension, lowest=1)


def distinct(count: str, dimension: str) -> Values:
    """Return values that are `count` different indices into a dimension."""

    def made(dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
        import torch

        return torch.randperm(dims[dimension], generator=generator)[: dims[count]]

    return Values("int64", made=made)


def between(low: float, high: float) -> Values:
    """Return float32 values between two bounds, whatever the storage type."""
    return Values("fp32", between=(low, high))


def often(value: float, low: float, high: float, shape: str) -> Values:
    """Like `between`, but about half of the values are `value`, which a kernel may treat as a special case. The largest
    case, which is timed, has none of them."""

    def made(dims: Dims, generator: torch.Generator, full: bool) -> Tensor:
        import torch

        count = dims[shape]
        numbers = low + (high - low) * torch.rand(count, generator=generator)
        usual = torch.rand(count, generator=generator) < (0.0 if full else 0.5)
        return numbers.masked_fill(usual, value)

    return Values("fp32", made=made)


STORAGE = Values()
#: Values of the storage type that will be rounded to codes (codes.py).
TO_CODES = Values(exact=True)
FLOAT = Values("fp32")
HALF = Values("fp16")
BITS = Values("int32")
LONG_BITS = Values("int64")
FLAG = Values("bool")
CODES = Values("int8")
#: Scales of codes, chosen so that codes * scale is as large as other test values.
SCALES = between(0.0, 0.03)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor argument; `dims` are its extents, by name or as numbers."""

    name: str
    dims: tuple[str, ...]
    #: "input", "output", "updated" (an input that the op changes in part), "constant" (an input that is copied into the
    #: module's constant memory), or "scratch": zeros before the first launch. Counters in it are left at zero, the rest
    #: may hold anything.
    role: str = "input"
    holds: Values = STORAGE
    #: The extents of what an op reads or writes, if that may be less than all: the rows that are looked up, for
    #: example.
    touched: tuple[str, ...] | None = None
    #: Four dimensions, of which all but the last may be strided: the device gets a View instead of a pointer.
    strided: bool = False
    #: The tunable with the number of rows per tile, where hardware copies tiles: the device gets a TensorMap.
    tiled_by: str | None = None
    #: Whether it may lie in the host's pinned memory, so that data used once by a launch need not be copied.
    pinned: bool = False

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Return its extents for the given dimensions."""
        return tuple(extent_of(name, dims) for name in self.dims)

    def element(self, dtype: str) -> str:
        """Return the name of its element type in a variant that stores `dtype`."""
        return self.holds.element or dtype

    def bytes(self, dims: Dims, dtype: str) -> int:
        """Return the bytes that a kernel must move: what it touches, counted once even if it is read twice."""
        touched = (extent_of(name, dims) for name in self.touched or self.dims)
        return min(math.prod(self.shape(dims)), math.prod(touched)) * ELEMENT_BYTES[self.element(dtype)]

    def definition(self, dtype: str, dims: Dims) -> str:
        """Return the declaration of the constant memory that holds it."""
        kind, count = CUDA_TYPES[self.element(dtype)], math.prod(self.shape(dims))
        return f"__constant__ __align__(16) {kind} {self.name}[{count}];"

    def declaration(self, dtype: str, *, overlapping: bool) -> str:
        """Return the declaration of the kernel parameter. With __restrict__ the compiler may read an input at any time.
        So scratch, which other blocks write, has none, and neither has an overlapping launch, which begins before the
        preceding one has written."""
        kind = CUDA_TYPES[self.element(dtype)]
        if self.strided:
            return f"const warpline::View<{kind}> {self.name}"
        if self.tiled_by is not None:
            return f"const __grid_constant__ warpline::TensorMap {self.name}"
        promise = "" if overlapping or self.role == "scratch" else "__restrict__ "
        return f"{'const ' if self.role == 'input' else ''}{kind}* {promise}{self.name}"


def extent_of(name: str, dims: Dims) -> int:
    """Return the extent of a name: a dimension, a number, or a formula such as "depth+2" or "columns/8"."""
    base, _, divisor = name.partition("/")
    base, _, more = base.partition("+")
    return (int(base) if base.isdigit() else dims[base]) // int(divisor or 1) + int(more or 0)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number argument: a dimension or tunable of that name, or a value of its own with a default."""

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
    """An argument of the device function that this op does not use, and the expression passed instead."""

    name: str
    value: str = "nullptr"


def reads(name: str, dims: str, holds: Values = STORAGE, *, touched: str | None = None) -> Buffer:
    """Return an input buffer; `dims` and `touched` are names separated by spaces."""
    return Buffer(name, tuple(dims.split()), holds=holds, touched=None if touched is None else tuple(touched.split()))


def matrix(name: str, dims: str, *, coded: bool, touched: str | None = None) -> tuple[Buffer, Buffer | Absent]:
    """Return a matrix and, if it is `coded` (int8 codes), the scale of each of its rows."""
    if not coded:
        return reads(name, dims, touched=touched), Absent("scale")
    rows = dims.split()[0]
    scale = reads("scale", rows, SCALES, touched=None if touched is None else touched.split()[0])
    return reads(name, dims, CODES, touched=touched), scale


def pinned(buffer: Buffer) -> Buffer:
    """Return the same buffer, allowed to lie in the host's pinned memory."""
    return replace(buffer, pinned=True)


def tiles(name: str, dims: str, rows: str) -> Buffer:
    """Return an input matrix that is read in tiles; the tunable `rows` is the number of rows per tile."""
    return Buffer(name, tuple(dims.split()), tiled_by=rows)


def views(name: str, dims: str, holds: Values = STORAGE, *, touched: str | None = None) -> Buffer:
    """Return an input that may be strided."""
    return replace(reads(name, dims, holds, touched=touched), strided=True)


def updates(
    name: str, dims: str, holds: Values = STORAGE, *, touched: str | None = None, strided: bool = False
) -> Buffer:
    """Return an input of which the op changes a part."""
    parts = None if touched is None else tuple(touched.split())
    return Buffer(name, tuple(dims.split()), "updated", holds, parts, strided)


def writes(name: str, dims: str, holds: Values = STORAGE) -> Buffer:
    """Return an output buffer."""
    return Buffer(name, tuple(dims.split()), "output", holds)


def scratch(name: str, dims: str, holds: Values = FLOAT) -> Buffer:
    """Return working memory; its dimensions may be tunables."""
    return Buffer(name, tuple(dims.split()), "scratch", holds)
