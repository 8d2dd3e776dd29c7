"""x matrix^T for the rows of a call (sequences, tokens of a prompt or drafts), with a matrix in panels.

The idea: a panel has `PANEL` outputs, input by input: for each input the weights of all these outputs are contiguous,
or for `QUAD` inputs their codes. So a matrix is read sequentially, a row of x needs no sum across a vector, and a block
of twelve rows keeps 24 vectors of sums in registers, as much as the CPU can multiply. Sums are added in the order of
the inputs, in runs of `RUN`, so the bits of a row do not depend on other rows.

Memory traffic: the matrix once for each block of rows, from memory for the first and from the L2 cache for the others.
Tried and lost: panels of 48 and 64 outputs (as fast for many rows, slower for few), huge pages for the weights
(nothing), copies of x in blocks (nothing: rows an odd number of cache lines apart are enough).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from warpline.kernels.cpu.intrinsics import INNER
from warpline.kernels.cpu.sizes import BEHIND_ROW, LANES, PANEL, QUAD, TALL
from warpline.kernels.cpu.vectors import STORED, VECTOR, fused, loaded, number, picked, spread

_INT8, _INT16, _INT32, _INT64, _FLOAT = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
_INTEGERS = ir.VectorType(_INT32, LANES)
_VECTORS = PANEL // LANES
#: Inputs whose products are added up before they are added to earlier sums: short sums round less, and those of 16-bit
#: values stay below 2^31.
RUN = 512
#: Prefetch distance in bytes: two pages, at which the CPU's own prefetching ends.
_AHEAD = 8192
#: Steps that are unrolled.
_UNROLLED = 4


class _Tile(ABC):
    """The instructions of a block of rows of x times some vectors of a panel's outputs.

    Arguments: address of the panel at the first vector; inputs; address of the first row; bytes from row to row; valid
    rows, at most `rows` (the others repeat the last one and are not stored); scales of these outputs or 0; biases or 0;
    address of the first result; bytes from row to row of results; valid outputs from here on; whether results are added
    to the stored values.
    """

    #: Inputs of a step, bytes of a vector's weights in it, and vectors of sums per row and vector of outputs, with
    #: their type.
    inputs: int
    bytes: int
    sums: int
    kind: Any

    def __init__(self, rows: int, vectors: int, builder: Any, arguments: Any):
        self.rows, self.vectors, self.builder = rows, vectors, builder
        self.matrix, self.count_inputs, self.x, self.x_apart, self.count = arguments[:5]
        self.scales, self.biases, self.target, self.apart, self.left, self.adds = arguments[5:]
        last = builder.sub(self.count, number(1))
        self.at = []  # the rows' addresses
        for row in range(rows):
            there = builder.select(builder.icmp_signed("<", number(row), last), number(row), last)
            self.at.append(builder.add(self.x, builder.mul(self.x_apart, there)))

    @abstractmethod
    def step(self, totals: Any, index: Any) -> None:
        """Add the products of a step to vectors in memory."""

    @abstractmethod
    def result(self, totals: list[Any]) -> Any:
        """Return the sums of a row and a vector of outputs as one vector of float32."""

    def made(self) -> None:
        """Emit the whole block."""
        builder = self.builder
        pairs = [(row, vector) for row in range(self.rows) for vector in range(self.vectors)]
        zero = ir.Constant(VECTOR, None)
        results = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, len(pairs)))
        places = [builder.gep(results, [_INT32(0), _INT32(i)]) for i in range(len(pairs))]
        for place in places:
            builder.store(zero, place)
        steps = builder.udiv(builder.add(self.count_inputs, number(self.inputs - 1)), number(self.inputs))
        run = number(RUN // self.inputs)
        runs = builder.udiv(builder.add(steps, builder.sub(run, number(1))), run)
        # LLVM keeps them in registers.
        totals = {pair: [cgutils.alloca_once(builder, self.kind) for _ in range(self.sums)] for pair in pairs}
        with cgutils.for_range(builder, runs) as loop:
            first = builder.mul(loop.index, run)
            rest = builder.sub(steps, first)
            some = builder.select(builder.icmp_unsigned("<", rest, run), rest, run)
            for each in totals.values():
                for total in each:
                    builder.store(ir.Constant(self.kind, None), total)
            whole = builder.udiv(some, number(_UNROLLED))
            with cgutils.for_range(builder, whole) as inner:
                begin = builder.add(first, builder.mul(inner.index, number(_UNROLLED)))
                for i in range(_UNROLLED):
                    self.step(totals, builder.add(begin, number(i)))
            done = builder.mul(whole, number(_UNROLLED))
            with cgutils.for_range(builder, builder.sub(some, done)) as inner:
                self.step(totals, builder.add(builder.add(first, done), inner.index))
            for place, pair in zip(places, pairs, strict=True):
                found = self.result([builder.load(total) for total in totals[pair]])
                builder.store(builder.fadd(builder.load(place), found), place)
        with cgutils.for_range(builder, self.count) as loop:
            for vector in range(self.vectors):
                index = builder.add(builder.mul(loop.index, number(self.vectors)), number(vector))
                found = builder.load(builder.gep(results, [_INT32(0), builder.trunc(index, _INT32)]))
                row = builder.add(self.x, builder.mul(self.x_apart, loop.index))
                target = builder.add(self.target, builder.mul(self.apart, loop.index))
                self._store(self.scaled(found, row, vector), builder.add(target, number(4 * LANES * vector)), vector)

    def scaled(self, found: Any, row: Any, vector: int) -> Any:
        """Return results of the row at an address, scaled to the units of y."""
        return found

    def _store(self, found: Any, target: Any, vector: int) -> None:
        """Store results plus biases, plus the stored values if `adds`. A panel may have fewer outputs than lanes;
        biases are padded."""
        builder, start = self.builder, 4 * LANES * vector
        zeros = builder.ptrtoint(cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)), _INT64)
        has_bias = builder.icmp_unsigned("!=", self.biases, number(0))
        bias = builder.select(has_bias, builder.add(self.biases, number(start)), zeros)
        found = builder.fadd(found, self.load(bias, VECTOR))
        with builder.if_else(builder.icmp_signed(">=", self.left, number(LANES * (vector + 1)))) as (whole, part):
            with whole:
                before = self.load(target, VECTOR)
                builder.store(
                    builder.select(self.adds, builder.fadd(found, before), found),
                    builder.inttoptr(target, VECTOR.as_pointer()),
                    align=4,
                )
            with part:
                lanes = builder.sub(self.left, number(LANES * vector))
                some = builder.select(builder.icmp_signed("<", lanes, number(0)), number(0), lanes)
                with cgutils.for_range(builder, some) as loop:
                    one = builder.extract_element(found, loop.index)
                    place = builder.add(target, builder.mul(loop.index, number(4)))
                    before = self.load(place, _FLOAT)
                    value = builder.select(self.adds, builder.fadd(one, before), one)
                    builder.store(value, builder.inttoptr(place, _FLOAT.as_pointer()), align=4)

    # --- what steps are made of -----------------------------------------------------------------------------------

    def load(self, address: Any, kind: Any) -> Any:
        """Load from an address of any alignment."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def weights(self, index: Any) -> list[Any]:
        """Return the addresses of a step's weights, one per vector, and prefetch later ones."""
        builder, size = self.builder, self.bytes
        start = builder.add(self.matrix, builder.mul(index, number(size * _VECTORS)))
        for line in range(0, size * self.vectors, 64):
            pointer = _INT8.as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
            prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            ahead = builder.inttoptr(builder.add(start, number(_AHEAD + line)), pointer)
            builder.call(prefetch, [ahead, _INT32(0), _INT32(3), _INT32(1)])  # for reading, into all caches
        return [builder.add(start, number(size * vector)) for vector in range(self.vectors)]


def _of_floats(stored: Any) -> type[_Tile]:
    """Return the tile class for weights of the numba type `stored`."""
    size = STORED[stored][1]

    class Floats(_Tile):
        inputs, bytes, sums, kind = 1, size * LANES, 1, VECTOR

        def step(self, totals: Any, index: Any) -> None:
            builder = self.builder
            weights = [loaded(builder, address, number(0), stored, VECTOR) for address in self.weights(index)]
            for row, start in enumerate(self.at):
                x = spread(builder, self.load(builder.add(start, builder.mul(index, number(4))), _FLOAT), VECTOR)
                for vector, weight in enumerate(weights):
                    (total,) = totals[row, vector]
                    builder.store(fused(builder, builder.load(total), weight, x), total)

        def result(self, totals: list[Any]) -> Any:
            return totals[0]

    return Floats


class _Codes(_Tile):
    """Tiles of int8 codes: pairs of 16-bit products are added, which LLVM compiles to one instruction."""

    inputs, bytes, sums, kind = QUAD, QUAD * LANES, 2, _INTEGERS

    def step(self, totals: Any, index: Any) -> None:
        builder, half = self.builder, QUAD * LANES // 2
        whole, kind = ir.VectorType(_INT32, half), ir.VectorType(_INT8, half)
        codes = [
            [builder.sext(self.load(builder.add(address, number(at)), kind), whole) for at in (0, half)]
            for address in self.weights(index)
        ]
        for row, start in enumerate(self.at):
            four = self.load(builder.add(start, builder.mul(index, number(2 * QUAD))), _INT64)
            fours = spread(builder, four, ir.VectorType(_INT64, half // QUAD))
            quanta = builder.bitcast(fours, ir.VectorType(_INT16, half))
            x = builder.sext(quanta, whole)
            for vector, both in enumerate(codes):
                for total, code in zip(totals[row, vector], both, strict=True):
                    products = builder.mul(code, x)
                    pairs = builder.add(*self._halves(products, products))
                    builder.store(builder.add(builder.load(total), pairs), total)

    def _halves(self, a: Any, b: Any) -> list[Any]:
        """Return the even lanes of two vectors, and the odd ones."""
        return [picked(self.builder, a, b, [*range(first, 2 * LANES, 2)]) for first in (0, 1)]

    def result(self, totals: list[Any]) -> Any:
        """The two sums of each output are neighbours."""
        return self.builder.sitofp(self.builder.add(*self._halves(*totals)), VECTOR)

    def scaled(self, found: Any, row: Any, vector: int) -> Any:
        builder = self.builder
        behind = builder.add(row, builder.sub(self.x_apart, number(BEHIND_ROW)))
        found = builder.fmul(found, spread(builder, self.load(behind, _FLOAT), VECTOR))
        return builder.fmul(found, self.load(builder.add(self.scales, number(4 * LANES * vector)), VECTOR))


# --- products ---------------------------------------------------------------------------------------------------------


@functools.cache
def _tile(kind: type[_Tile], rows: int, vectors: int) -> Callable[..., int]:
    """Return the function for a tile, with the arguments of `_Tile`."""

    @intrinsic
    def made(
        _context: Any, matrix: Any, inputs: Any, x: Any, x_apart: Any, count: Any, scales: Any, biases: Any,
        target: Any, apart: Any, left: Any, adds: Any,
    ) -> Any:  # fmt: skip
        def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            kind(rows, vectors, builder, arguments).made()
            return arguments[4]

        return types.int64(*[types.int64] * 10, types.boolean), make

    return made


#: Rows and vectors of outputs of the blocks that fit into the registers, largest first, by whether vectors have 64
#: bytes (32 registers; otherwise 16 of 32 bytes, of which a vector here takes two) and by the vectors of sums per pair.
_TILES = {
    (True, 1): ((TALL, 2), (8, 2), (4, 2), (2, 2), (1, 2)),
    (True, 2): ((6, 2), (4, 2), (2, 2), (1, 2)),
    (False, 1): ((6, 1), (3, 2), (1, 2)),
    (False, 2): ((3, 1), (1, 2)),
}


def _block_of(kind: type[_Tile], tiles: tuple[tuple[int, int], ...]) -> Callable[..., int]:
    """Return a function that multiplies a panel with the first rows: with the largest tile, or with the smallest that
    has enough rows. It takes the arguments of `_Tile` and returns how many rows are done."""
    (most, vectors), smaller = tiles[0], tiles[1:]
    tile, parts = _tile(kind, most, vectors), _VECTORS // vectors
    part_bytes, lanes = kind.bytes * vectors, LANES * vectors

    @njit(**INNER)
    def largest(
        matrix: int, inputs: int, x: int, x_apart: int, rows: int, scales: int, biases: int, y: int, apart: int,
        left: int, adds: bool,
    ) -> int:  # fmt: skip
        count = min(rows, most)
        for part in range(parts):
            start = 4 * lanes * part
            bias = biases + start if biases != 0 else 0
            tile(
                matrix + part * part_bytes, inputs, x, x_apart, count, scales + start, bias, y + start, apart,
                left - lanes * part, adds,
            )  # fmt: skip
        return count

    if not smaller:
        return largest
    others, enough = _block_of(kind, smaller), smaller[0][0]

    @njit(**INNER)
    def block(
        matrix: int, inputs: int, x: int, x_apart: int, rows: int, scales: int, biases: int, y: int, apart: int,
        left: int, adds: bool,
    ) -> int:  # fmt: skip
        if rows > enough:
            return largest(matrix, inputs, x, x_apart, rows, scales, biases, y, apart, left, adds)
        return others(matrix, inputs, x, x_apart, rows, scales, biases, y, apart, left, adds)

    return block


@functools.cache
def multiply_panels_of(stored: Any, wide: bool) -> Callable[..., None]:
    """Return the product with a matrix of numpy's type `stored`: panels `first` to `last` for every row of x, times
    scales, plus biases if given, stored in y or added to it. Codes need rows of x in quanta. All arguments are
    addresses, and row strides are in bytes. `wide`: the CPU has 64-byte vectors."""
    kind = _Codes if stored is np.int8 else _of_floats(from_dtype(np.dtype(stored)))
    block, step, step_bytes = _block_of(kind, _TILES[wide, kind.sums]), kind.inputs, kind.bytes * _VECTORS

    @njit(**INNER)
    def multiply(
        matrix: int, scales: int, biases: int, x: int, x_apart: int, rows: int, inputs: int, y: int, apart: int,
        outputs: int, first: int, last: int, adds: bool,
    ) -> None:  # fmt: skip
        size = (inputs + step - 1) // step * step_bytes
        for panel in range(first, last):
            start, left, r = 4 * panel * PANEL, outputs - panel * PANEL, 0
            bias = biases + start if biases != 0 else 0
            while r < rows:
                r += block(
                    matrix + panel * size, inputs, x + r * x_apart, x_apart, rows - r, scales + start, bias,
                    y + r * apart + start, apart, left, adds,
                )  # fmt: skip

    return multiply
