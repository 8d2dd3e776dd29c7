"""Products of a few rows of x with a few rows of a matrix, as LLVM vectors.

A sum has a fixed order: element i of a row goes into sum i mod `STRIDE`, and these sums are added in pairs. The number
of rows and outputs computed together changes how often data are read, and no bit. Loops that the compiler vectorises
itself may differ from each other.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from warpline.kernels.cpu.intrinsics import Number
from warpline.kernels.cpu.sizes import LANES

_INT16, _INT32, _INT64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
#: Independent vectors of sums per product.
CHAINS = 2
STRIDE = LANES * CHAINS
VECTOR = ir.VectorType(_FLOAT, LANES)
#: Rounded to float32: the exponential is a power of 2.
LOG2_E = 1.44269502162933349609375

#: LLVM's type of a stored value, and its bytes (see `intrinsics.load`).
STORED = {types.float32: (_FLOAT, 4), types.int16: (ir.HalfType(), 2), types.uint16: (_INT16, 2)}


def _floats(builder: Any, x: Any, kind: Any, like: Any) -> Any:
    """Convert stored values to float32; `like` is the result type, a vector or a scalar."""
    whole = ir.VectorType(_INT32, LANES) if isinstance(like, ir.VectorType) else _INT32
    if kind == types.float32:
        return x
    if kind == types.int16:
        return builder.fpext(x, like)
    shift = ir.Constant(whole, [16] * LANES if whole is not _INT32 else 16)
    return builder.bitcast(builder.shl(builder.zext(x, whole), shift), like)


def loaded(builder: Any, base: Any, index: Any, kind: Any, like: Any) -> Any:
    """Load stored values from an index on as float32: a vector, or one value."""
    element, size = STORED[kind]
    address = builder.add(base, builder.mul(index, ir.Constant(_INT64, size)))
    shape = ir.VectorType(element, LANES) if isinstance(like, ir.VectorType) else element
    found = builder.load(builder.inttoptr(address, shape.as_pointer()), align=size)
    return _floats(builder, found, kind, like)


def fused(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return total + a * b, rounded once where the CPU can."""
    name = "llvm.fmuladd.v16f32" if isinstance(total.type, ir.VectorType) else "llvm.fmuladd.f32"
    kind = ir.FunctionType(total.type, [total.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, total])


def picked(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Shuffle: pick lanes of two vectors."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def summed(builder: Any, vector: Any) -> Any:
    """Return the sum of a vector: lanes i and i + 8, then of these i and i + 4, and so on."""
    size = LANES
    while size > 1:
        size //= 2
        vector = builder.fadd(*(picked(builder, vector, vector, [*range(at, at + size)]) for at in (0, size)))
    return builder.extract_element(vector, ir.Constant(_INT32, 0))


def summed_together(builder: Any, vectors: list[Any]) -> Any:
    """Return the sums of up to four vectors, in the same order as `summed` and a third of its steps: halves and
    quarters of different vectors share a vector."""
    a, b, c, d = (vectors + vectors[:1] * 3)[:4]
    low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    halves = [builder.fadd(picked(builder, x, y, low), picked(builder, x, y, high)) for x, y in ((a, b), (c, d))]
    fours = [[8 * group + first + i for group in range(4) for i in range(4)] for first in (0, 4)]
    whole = builder.fadd(*(picked(builder, halves[0], halves[1], lanes) for lanes in fours))
    for step in (2, 1):
        whole = builder.fadd(whole, picked(builder, whole, whole, [lane ^ step for lane in range(LANES)]))
    return picked(builder, whole, whole, [4 * i for i in range(len(vectors))])


def number(n: int) -> Any:
    """Return a 64-bit constant."""
    return ir.Constant(_INT64, n)


def alike(like: Any, value: float) -> Any:
    """Return a constant of a type: a scalar, or a vector of equal lanes."""
    return ir.Constant(like, [value] * LANES if isinstance(like, ir.VectorType) else value)


def spread(builder: Any, one: Any, like: Any) -> Any:
    """Broadcast a value to every lane, or return it for a scalar type."""
    if not isinstance(like, ir.VectorType):
        return one
    first = builder.insert_element(ir.Constant(like, ir.Undefined), one, _INT32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT32, like.count), None))


def larger(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger one, or b if one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def exponential(builder: Any, x: Any) -> Any:
    """Return 2 to the x with a relative error of 2e-7, at least 2^-126. NaN stays NaN."""
    like = x.type
    whole = ir.VectorType(_INT32, LANES) if isinstance(like, ir.VectorType) else _INT32
    most = alike(like, 126.0)
    x = builder.select(builder.fcmp_ordered("<", most, x), most, larger(builder, alike(like, -126.0), x))
    suffix = f"v{LANES}f32" if isinstance(like, ir.VectorType) else "f32"
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(like, [like]), f"llvm.floor.{suffix}")
    nearest = builder.call(floor, [builder.fadd(x, alike(like, 0.5))])
    rest = builder.fsub(x, nearest)
    found = alike(like, _as_single(1.5403530e-4))
    for term in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        found = fused(builder, alike(like, _as_single(term)), found, rest)
    exponent = builder.add(builder.fptosi(nearest, whole), alike(whole, 127))
    return builder.fmul(found, builder.bitcast(builder.shl(exponent, alike(whole, 23)), like))


def _as_single(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose `LANES` vectors: lane j of vector i becomes lane i of vector j."""
    rows, step = list(rows), LANES // 2
    while step:
        for i in (i for i in range(LANES) if not i & step):
            a, b = rows[i], rows[i | step]
            rows[i] = picked(builder, a, b, [LANES + (j ^ step) if j & step else j for j in range(LANES)])
            rows[i | step] = picked(builder, a, b, [LANES + j if j & step else j | step for j in range(LANES)])
        step //= 2
    return rows


@functools.cache
def products(rows: int, outputs: int, *, in_turn: bool = False) -> Callable[..., Number]:
    """Return the products of `rows` rows of x with `outputs` rows of a matrix, read side by side, or one after another
    if `in_turn`. Arguments of the function: address of the matrix's first row, type of its elements, address of the
    first row of x, elements of a row, address of the sums, and their row stride. It returns the last sum."""

    @intrinsic
    def made(_context: Any, weights: Any, kind: Any, x: Any, inputs: Any, sums: Any, apart: Any) -> Any:
        stored = kind.instance_type

        def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            weights, _, x, inputs, target, apart = arguments
            pairs = [(r, o) for r in range(rows) for o in range(outputs)]

            def room(like: Any) -> Any:
                made = cgutils.alloca_once(builder, like)
                zero = [0.0] * LANES if isinstance(like, ir.VectorType) else 0.0
                builder.store(ir.Constant(like, zero), made)
                return made

            totals = {(r, o, c): room(VECTOR) for r, o in pairs for c in range(CHAINS)}
            rest = {pair: room(_FLOAT) for pair in pairs}

            def step(read: range, first: Any, like: Any, into: Any) -> None:
                """Add one element, or one vector of elements, of every row of x and of the matrix rows `read`."""
                starts = [
                    builder.add(first, builder.mul(inputs, ir.Constant(_INT64, i))) for i in range(max(rows, outputs))
                ]
                ws = {o: loaded(builder, weights, starts[o], stored, like) for o in read}
                xs = [loaded(builder, x, starts[r], types.float32, like) for r in range(rows)]
                for r, o in pairs:
                    if o in read:
                        builder.store(fused(builder, builder.load(into(r, o)), ws[o], xs[r]), into(r, o))

            def read_rows(read: range) -> None:
                most = builder.udiv(inputs, number(STRIDE))
                with cgutils.for_range(builder, most) as loop:
                    first = builder.mul(loop.index, number(STRIDE))
                    for chain in range(CHAINS):
                        at = builder.add(first, number(LANES * chain))
                        step(read, at, VECTOR, lambda r, o, c=chain: totals[r, o, c])
                done = builder.mul(most, number(STRIDE))
                more = builder.udiv(builder.sub(inputs, done), number(LANES))
                with cgutils.for_range(builder, more) as loop:
                    at = builder.add(done, builder.mul(loop.index, number(LANES)))
                    step(read, at, VECTOR, lambda r, o: totals[r, o, 0])
                done = builder.add(done, builder.mul(more, number(LANES)))
                with cgutils.for_range(builder, builder.sub(inputs, done)) as loop:
                    step(read, builder.add(done, loop.index), _FLOAT, lambda r, o: rest[r, o])

            for first_read in range(0, outputs, 1 if in_turn else outputs):
                read_rows(range(first_read, first_read + 1) if in_turn else range(outputs))
            vectors = []
            for r, o in pairs:
                chains = [builder.load(totals[r, o, chain]) for chain in range(CHAINS)]
                vectors.append(functools.reduce(builder.fadd, chains))
            found = []
            for first in range(0, len(pairs), 4):
                some = vectors[first : first + 4]
                if len(some) == 1:
                    found.append(summed(builder, some[0]))
                else:
                    sums = summed_together(builder, some)
                    found += [builder.extract_element(sums, ir.Constant(_INT32, i)) for i in range(len(some))]
            for (r, o), one in zip(pairs, found, strict=True):
                total = builder.fadd(one, builder.load(rest[r, o]))
                index = builder.add(builder.mul(apart, number(r)), number(o))
                address = builder.add(target, builder.mul(index, number(4)))
                builder.store(total, builder.inttoptr(address, _FLOAT.as_pointer()))
            return total

        return types.float32(types.int64, kind, *[types.int64] * 4), make

    return made
