"""Products of int8 codes with rows of x that are rounded to 16 bits: sums of integers, which no order changes.

A row of x becomes quanta, x = quantum * (256 upper + lower), and both parts fit a byte. A CPU with VNNI multiplies
bytes: 64 codes take two instructions, one for each part. One factor of that instruction has no sign; that is the codes,
read as they lie with their upper bit flipped, which adds 128 to each. What that adds to a sum is known of each row of x
beforehand. Other CPUs multiply 16-bit numbers. Converting codes to float32 takes three instructions for 16 of them,
longer than memory takes to deliver them.

With 16 bits for the largest element, rounding loses less than storing x in bf16 would, and about what fp16 does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from warpline.kernels.cpu.intrinsics import INNER, Number, array, as_bits, as_float
from warpline.kernels.cpu.sizes import BEHIND_ROW, LANES, STEP
from warpline.kernels.cpu.vectors import number, picked, summed, summed_together

_INT8, _INT16, _INT32, _INT64, _FLOAT = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
_SUMS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(_FLOAT, LANES)
#: The largest number of quanta whose parts are bytes.
_MOST = 127 * 256 + 127
_INFINITE = np.int32(0x7F800000)
_SIGN = 0x80


@dataclass(frozen=True, slots=True)
class Unit:
    """How a CPU multiplies bytes, and what its registers hold: a block of so many rows of x and outputs, or an output
    of so many rows."""

    name: str
    rows: int
    outputs: int
    few: int


#: Vectors of 64 bytes, of 32 bytes, and 16-bit numbers.
WIDE, NARROW, WORDS = Unit("wide", 3, 4, 4), Unit("narrow", 1, 3, 2), Unit("words", 3, 2, 4)


def unit_of(features: str) -> Unit:
    """Of a CPU with LLVM's list of features."""
    has = features.split(",").count
    if has("+avx512vnni") and has("+avx512bw"):
        return WIDE
    return NARROW if has("+avxvnni") else WORDS


@njit(**INNER)
def padded(inputs: int) -> int:
    """Elements of a row of x in quanta."""
    return (inputs + STEP - 1) // STEP * STEP


# --- rows of x --------------------------------------------------------------------------------------------------------


@njit(**INNER)
def quantum_of(x: np.ndarray) -> Number:
    """What a quantum of a row is; 0 if the row is as good as zero, infinite if it is not finite."""
    largest = np.int32(0)
    for i in range(len(x)):
        largest = max(largest, np.int32(as_bits(x[i]) & np.int32(0x7FFFFFFF)))
    if largest >= _INFINITE:
        return np.float32(np.inf)
    if as_float(largest) < np.float32(1e-30):
        return np.float32(0)
    # The sums of a lane, at most so many products with codes of up to 128, stay below 2^31.
    most = min(_MOST, (2**31 - 1) // (128 * (padded(len(x)) // LANES)))
    return as_float(largest) / np.float32(most)


@njit(**INNER)
def _per_one(quantum: Number) -> Number:
    return np.float32(1) / quantum if np.float32(0) < quantum < np.float32(np.inf) else np.float32(0)


@njit(**INNER)
def _keep_quantum(quantum: Number, behind: int) -> None:
    known = quantum if quantum < np.float32(np.inf) else np.float32(np.nan)  # and so are its products
    array(behind + 4 * LANES, np.float32, 1)[0] = known


@functools.cache
def rounded_of(unit: Unit) -> Callable[..., None]:
    """A row of x becomes quanta at an address, which begins a line of the cache."""
    flipped = _flipped_of(unit)

    @njit(**INNER)
    def in_words(x: np.ndarray, at: int) -> None:
        count, quantum = len(x), quantum_of(x)
        room, per_one = padded(count), _per_one(quantum)
        words = array(at, np.int16, room)
        for i in range(count):
            words[i] = np.int16(np.int32(math.floor(x[i] * per_one + np.float32(0.5))))
        for i in range(count, room):
            words[i] = np.int16(0)
        _keep_quantum(quantum, at + 2 * room)

    @njit(**INNER)
    def in_bytes(x: np.ndarray, at: int) -> None:
        count, quantum = len(x), quantum_of(x)
        room, per_one = padded(count), _per_one(quantum)
        upper, lower = array(at, np.int8, room), array(at + room, np.int8, room)
        for i in range(count):
            quanta = np.int32(math.floor(x[i] * per_one + np.float32(0.5)))
            above = np.int32(np.int32(quanta + np.int32(128)) >> np.int32(8))
            upper[i] = np.int8(above)
            lower[i] = np.int8(quanta)
        for i in range(count, room):
            upper[i] = lower[i] = np.int8(0)
        flipped(at, room)
        _keep_quantum(quantum, at + 2 * room)

    return in_words if unit is WORDS else in_bytes


@functools.cache
def _flipped_of(unit: Unit) -> Callable[..., int]:
    """Store behind a row what codes of zero make of it with their upper bit flipped."""

    @intrinsic
    def made(_context: Any, at: Any, room: Any) -> Any:
        def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            at, room = arguments
            zero = ir.Constant(_SUMS, None)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]
            codes = _flipped(builder, ir.Constant(ir.VectorType(_INT8, STEP), None))
            with cgutils.for_range(builder, builder.udiv(room, number(STEP))) as loop:
                here = builder.add(at, builder.mul(loop.index, number(STEP)))
                for total, where in zip(sums, (here, builder.add(here, room)), strict=True):
                    part = _load(builder, where, ir.VectorType(_INT8, STEP))
                    builder.store(_dots(builder, unit, builder.load(total), codes, part), total)
            behind = builder.add(at, builder.mul(room, number(2)))
            whole = _whole(builder, *(builder.load(total) for total in sums))
            builder.store(whole, builder.inttoptr(behind, _SUMS.as_pointer()), align=4)
            return room

        return types.int64(types.int64, types.int64), make

    return made


# --- products ---------------------------------------------------------------------------------------------------------


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _flipped(builder: Any, codes: Any) -> Any:
    """As numbers without a sign, 128 larger."""
    return builder.xor(codes, ir.Constant(codes.type, [_SIGN] * STEP))


def _dots(builder: Any, unit: Unit, total: Any, codes: Any, part: Any) -> Any:
    """To each of 16 sums four products: of bytes without a sign and bytes with one."""
    count = LANES if unit is WIDE else LANES // 2
    few, pieces = ir.VectorType(_INT32, count), LANES // count
    name, kind = f"llvm.x86.avx512.vpdpbusd.{32 * count}", ir.FunctionType(few, [few] * 3)
    call = cgutils.get_or_insert_function(builder.module, kind, name)
    found = []
    for piece in range(pieces):
        lanes, wholes = [*range(count * piece, count * (piece + 1))], []
        for vector in (total, codes, part):
            whole = vector if vector.type == _SUMS else builder.bitcast(vector, _SUMS)
            wholes.append(whole if pieces == 1 else picked(builder, whole, whole, lanes))
        found.append(builder.call(call, wholes))
    return found[0] if pieces == 1 else picked(builder, found[0], found[1], [*range(LANES)])


def _words(builder: Any, total: Any, codes: Any, words: Any) -> Any:
    """To each of 16 sums two products of 16-bit numbers; LLVM knows this as one instruction."""
    whole = ir.VectorType(_INT32, 2 * LANES)
    products = builder.mul(builder.sext(codes, whole), builder.sext(words, whole))
    pairs = [picked(builder, products, products, [*range(first, 2 * LANES, 2)]) for first in (0, 1)]
    return builder.add(total, builder.add(*pairs))


def _whole(builder: Any, upper: Any, lower: Any) -> Any:
    """What two parts' sums mean; overflows cancel, since the result has none."""
    return builder.add(builder.shl(upper, ir.Constant(_SUMS, [8] * LANES)), lower)


@functools.cache
def products(unit: Unit, rows: int, outputs: int, *, in_turn: bool = False) -> Callable[..., int]:
    """Of so many rows of x in quanta and of codes, whose rows are read side by side, or in turn; at most four outputs.
    Compiled code calls it with addresses and numbers: the first row of codes, elements of a row, the first row of x,
    scales of the outputs, biases or 0, where the first result goes, from row to row of results, whether to add."""

    @intrinsic
    def made(
        _context: Any, codes: Any, inputs: Any, x: Any, scales: Any, biases: Any, target: Any, apart: Any, adds: Any
    ) -> Any:
        def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Block(builder, unit, rows, outputs, *arguments).made(in_turn)
            return arguments[-1]

        return types.boolean(*[types.int64] * 7, types.boolean), make

    return made


class _Block:
    """The instructions of one `products`."""

    def __init__(self, builder: Any, unit: Unit, rows: int, outputs: int, *arguments: Any):
        self.builder, self.unit, self.rows, self.outputs = builder, unit, rows, outputs
        self.codes, self.inputs, self.x, self.scales, self.biases, self.target, self.apart, self.adds = arguments
        steps = builder.udiv(builder.add(self.inputs, number(STEP - 1)), number(STEP))
        self.room = builder.mul(steps, number(STEP))
        self.stride = builder.add(builder.mul(self.room, number(2)), number(BEHIND_ROW))

    def made(self, in_turn: bool) -> None:
        """All sums, and then what becomes of them."""
        found: dict[tuple[int, int], Any] = {}
        for first in range(0, self.outputs, 1 if in_turn else self.outputs):
            found |= self._sums([first] if in_turn else [*range(self.outputs)])
        for row in range(self.rows):
            self._store(row, [found[row, output] for output in range(self.outputs)])

    def _sums(self, read: list[int]) -> dict[tuple[int, int], Any]:
        """Of each pair of a row and an output 16 float32, whose sum is its product in quanta."""
        builder = self.builder
        pairs = [(row, output) for row in range(self.rows) for output in read]
        parts = 1 if self.unit is WORDS else 2
        zero = ir.Constant(_SUMS, None)
        # One pair alone has two sums for each part, which do not wait for one another.
        chains = 2 if len(pairs) == 1 else 1
        totals = {
            (*pair, part, chain): cgutils.alloca_once(builder, _SUMS)
            for pair in pairs for part in range(parts) for chain in range(chains)
        }  # fmt: skip
        for total in totals.values():
            builder.store(zero, total)
        starts = {o: builder.add(self.codes, builder.mul(self.inputs, number(o))) for o in read}
        whole = builder.udiv(self.inputs, number(STEP))
        together = builder.udiv(whole, number(chains))
        with cgutils.for_range(builder, together) as loop:
            first = builder.mul(loop.index, number(STEP * chains))
            for chain in range(chains):
                at = builder.add(first, number(STEP * chain))
                self._step(totals, at, {o: builder.add(start, at) for o, start in starts.items()}, chain)
        done = builder.mul(together, number(STEP * chains))
        if chains > 1:
            with builder.if_then(builder.icmp_unsigned("<", done, builder.mul(whole, number(STEP)))):
                self._step(totals, done, {o: builder.add(start, done) for o, start in starts.items()}, 0)
            done = builder.mul(whole, number(STEP))
        self._rest(totals, done, starts)
        found = {}
        for row, output in pairs:
            sums = [
                functools.reduce(builder.add, [builder.load(totals[row, output, part, c]) for c in range(chains)])
                for part in range(parts)
            ]
            total = sums[0]
            if parts == 2:
                known = builder.add(self._row(row), builder.mul(self.room, number(2)))
                total = builder.sub(_whole(builder, *sums), _load(builder, known, _SUMS))
            found[row, output] = builder.sitofp(total, _FLOATS)
        return found

    def _row(self, row: int) -> Any:
        return self.builder.add(self.x, self.builder.mul(self.stride, number(row)))

    def _rest(self, totals: dict[Any, Any], done: Any, starts: dict[int, Any]) -> None:
        """Codes that are no whole step, from a copy that is one: what lies behind a matrix may be nobody's."""
        builder, left = self.builder, self.builder.sub(self.inputs, done)
        with builder.if_then(builder.icmp_unsigned(">", left, number(0))):
            copies = {}
            for output, start in starts.items():
                copy = cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(_INT8, STEP), None))
                copies[output] = builder.ptrtoint(copy, _INT64)
                with cgutils.for_range(builder, left) as loop:
                    code = _load(builder, builder.add(builder.add(start, done), loop.index), _INT8)
                    into = builder.add(copies[output], loop.index)
                    builder.store(code, builder.inttoptr(into, _INT8.as_pointer()))
            self._step(totals, done, copies, 0)

    def _step(self, totals: dict[Any, Any], at: Any, codes: dict[int, Any], chain: int) -> None:
        """64 elements of every row and output; `codes` are the addresses of these."""
        builder = self.builder

        def add(row: int, output: int, part: int, make: Callable[..., Any], *factors: Any) -> None:
            total = totals[row, output, part, chain]
            builder.store(make(builder, *factors[:-2], builder.load(total), *factors[-2:]), total)

        if self.unit is WORDS:
            for half in (0, STEP // 2):
                read = {
                    output: _load(builder, builder.add(address, number(half)), ir.VectorType(_INT8, STEP // 2))
                    for output, address in codes.items()
                }
                for row in range(self.rows):
                    place = builder.mul(builder.add(at, number(half)), number(2))
                    words = _load(builder, builder.add(self._row(row), place), ir.VectorType(_INT16, STEP // 2))
                    for output in codes:
                        add(row, output, 0, _words, read[output], words)
            return
        kind = ir.VectorType(_INT8, STEP)
        flipped = {o: _flipped(builder, _load(builder, address, kind)) for o, address in codes.items()}
        for row in range(self.rows):
            upper = builder.add(self._row(row), at)
            for part, where in enumerate((upper, builder.add(upper, self.room))):
                factor = _load(builder, where, kind)
                for output in codes:
                    add(row, output, part, _dots, self.unit, flipped[output], factor)

    def _store(self, row: int, vectors: list[Any]) -> None:
        """Sums of a row times quantum and scales, plus biases, plus what is there."""
        builder, count = self.builder, len(vectors)
        some = ir.VectorType(_FLOAT, count)

        def spread(x: Any) -> Any:
            one = builder.insert_element(ir.Constant(some, ir.Undefined), x, ir.Constant(_INT32, 0))
            return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT32, count), None))

        zeros = builder.ptrtoint(cgutils.alloca_once_value(builder, ir.Constant(some, None)), _INT64)
        has_bias = builder.icmp_unsigned("!=", self.biases, number(0))
        bias = _load(builder, builder.select(has_bias, self.biases, zeros), some)
        quantum = _load(builder, builder.add(self._row(row), builder.add(
            builder.mul(self.room, number(2)), number(4 * LANES)
        )), _FLOAT)  # fmt: skip
        sums = summed_together(builder, vectors) if count > 1 else spread(summed(builder, vectors[0]))
        found = builder.fmul(sums, spread(quantum))
        found = builder.fadd(builder.fmul(found, _load(builder, self.scales, some)), bias)
        here = builder.add(self.target, builder.mul(self.apart, number(4 * row)))
        before = _load(builder, here, some)
        found = builder.select(self.adds, builder.fadd(found, before), found)
        builder.store(found, builder.inttoptr(here, some.as_pointer()), align=4)
