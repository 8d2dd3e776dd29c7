"""Operations that numba lacks: memory by its address, atomic words and sleeping on them, the bits of a float.

All become LLVM instructions or calls of C library functions by name, so that loaded code needs nothing of numba.
"""

from __future__ import annotations

import platform
import sys
import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

_INT32, _INT64, _FLOAT, _DOUBLE, _HALF = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType(), ir.HalfType()
#: float32, in compiled code.
Number = Any
#: How functions are compiled that only compiled code calls. Without a `fastmath` of its own, a function would inherit
#: that of whichever caller numba compiles first.
INNER = {"error_model": "numpy", "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "fastmath": False}

#: The system call with which a thread sleeps until a word changes; elsewhere, waiting threads yield.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_WAIT, _WAKE = 128, 129  # of this process only


def _made(context: Any, builder: Any, kind: Any, address: Any, shape: list[Any]) -> Any:
    """Return an array of contiguous elements, in memory that numba does not own."""
    element = kind.dtype
    size = context.get_abi_sizeof(context.get_data_type(element))
    strides = [ir.Constant(_INT64, size)]
    for extent in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], extent))
    made = context.make_array(kind)(context, builder)
    data = builder.inttoptr(address, context.get_data_type(element).as_pointer())
    itemsize = ir.Constant(_INT64, size)
    populate_array(made, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
    return made._getvalue()


@intrinsic
def array(_context: Any, address: Any, kind: Any, count: Any) -> Any:
    """Return the memory at an address as an array of numpy's type `kind`."""
    result = types.Array(kind.instance_type, 1, "C")

    def make(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _made(context, builder, result, arguments[0], [arguments[2]])

    return result(types.int64, kind, types.int64), make


@intrinsic
def matrix(_context: Any, address: Any, kind: Any, rows: Any, columns: Any) -> Any:
    """Return the memory at an address as a matrix of numpy's type `kind`."""
    result = types.Array(kind.instance_type, 2, "C")

    def make(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _made(context, builder, result, arguments[0], list(arguments[2:]))

    return result(types.int64, kind, types.int64, types.int64), make


# --- words that threads share -----------------------------------------------------------------------------------------


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INT64.as_pointer())


@intrinsic
def atomic_load(_context: Any, address: Any) -> Any:
    """Sequentially consistent load of a word: writes before the stored value are visible."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), make


@intrinsic
def add_fetch(_context: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the word and return the new value."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        old = builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], "seq_cst")
        return builder.add(old, arguments[1])

    return types.int64(types.int64, types.int64), make


@intrinsic
def compare_exchange(_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Set the word if it equals `expected`; return whether it did."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = _word(builder, arguments[0])
        return builder.extract_value(builder.cmpxchg(word, arguments[1], arguments[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), make


@intrinsic
def _futex(_context: Any, address: Any, operation: Any, value: Any) -> Any:
    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT64, [_INT64], var_arg=True)
        call = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        nothing = ir.Constant(_INT64, 0)
        return builder.call(call, [ir.Constant(_INT64, _FUTEX), *arguments, nothing, nothing, nothing])

    return types.int64(types.int64, types.int64, types.int64), make


@intrinsic
def _sched_yield(_context: Any) -> Any:
    def make(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT32, []), "sched_yield")
        return builder.call(call, [])

    return types.int32(), make


if _FUTEX:

    @njit(**INNER)
    def sleep(address: int, value: int) -> None:
        """Sleep until the word is woken, unless its lower half differs from that of `value`."""
        _futex(address, _WAIT, value & 0xFFFFFFFF)

    @njit(**INNER)
    def wake(address: int) -> None:
        """Wake all threads that sleep on the word."""
        _futex(address, _WAKE, 0x7FFFFFFF)
else:

    @njit(**INNER)
    def sleep(address: int, value: int) -> None:
        """Let other threads run."""
        _sched_yield()

    @njit(**INNER)
    def wake(address: int) -> None:
        """Nothing to do: no thread sleeps here."""


# --- numbers ----------------------------------------------------------------------------------------------------------


@intrinsic
def as_float(_context: Any, _bits: Any) -> Any:
    """Return the float with these bits."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), make


@intrinsic
def as_bits(_context: Any, _number: Any) -> Any:
    """Return the bits of a float."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), make


@intrinsic
def floor(_context: Any, _x: Any) -> Any:
    """Return the largest integer not above a float, as an instruction; the C function is not one on every CPU."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [_FLOAT])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.floor.f32")
        return builder.fptosi(builder.call(call, arguments), _INT32)

    return types.int32(types.float32), make


@intrinsic
def clock(_context: Any, room: Any) -> Any:
    """Return the monotonic clock in nanoseconds; needs 16 bytes of scratch at an address. 0 where there is no such
    clock."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if (which := getattr(time, "CLOCK_MONOTONIC", None)) is None:
            return _INT64(0)
        place = builder.inttoptr(arguments[0], _INT64.as_pointer())
        kind = ir.FunctionType(_INT32, [_INT32, _INT64.as_pointer()])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "clock_gettime"), [_INT32(which), place])
        seconds, rest = (builder.load(builder.gep(place, [_INT64(i)])) for i in range(2))
        return builder.add(builder.mul(seconds, _INT64(1_000_000_000)), rest)

    return types.int64(types.int64), make


@intrinsic
def erf(_context: Any, _x: Any) -> Any:
    """The C library's erf."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_DOUBLE, [_DOUBLE]), "erf")
        return builder.call(call, arguments)

    return types.float64(types.float64), make


@intrinsic
def _from_half(_context: Any, _bits: Any) -> Any:
    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], _HALF), _FLOAT)

    return types.float32(types.int16), make


@intrinsic
def _to_half(_context: Any, _number: Any) -> Any:
    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], _HALF), ir.IntType(16))

    return types.int16(types.float32), make


def load(x: Any) -> Any:
    """Return a stored value as float32. The element type tells the format: int8 codes (without their scale), fp16 as
    int16, bf16 as uint16."""
    raise NotImplementedError  # compiled code only


@overload(load, inline="always", strict=False)
def _load(x: Any) -> Any:
    if x == types.float32:
        return lambda x: x
    if x == types.int8:
        return lambda x: np.float32(x)
    if x == types.int16:
        return lambda x: _from_half(x)
    return lambda x: as_float(np.int32(np.uint32(x) << np.uint32(16)))


def store(at: Any, i: Any, x: Any) -> Any:
    """Store a float32 into an array in the format that `load` reads."""
    raise NotImplementedError  # compiled code only


@overload(store, inline="always", strict=False)
def _store(at: Any, i: Any, x: Any) -> Any:
    if at.dtype == types.float32:

        def put(at: Any, i: Any, x: Any) -> None:
            at[i] = x
    elif at.dtype == types.int16:

        def put(at: Any, i: Any, x: Any) -> None:
            at[i] = _to_half(x)
    else:

        def put(at: Any, i: Any, x: Any) -> None:
            bits = np.uint32(as_bits(x))
            at[i] = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return put
