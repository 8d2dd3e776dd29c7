"""What numba has no word for: memory by its address, a barrier for threads, the bits of a number.

Everything here becomes LLVM instructions or calls by name, so that what uses it can be kept on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

_INT32, _INT64, _FLOAT, _HALF = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.HalfType()
#: float32, in compiled code.
Number = Any
#: Times that a thread looks before it lets others run.
PATIENCE = 4000


@intrinsic
def pointer(_context: Any, address: Any, kind: Any) -> Any:
    """Memory at an address (int64) as elements of the type of the array `kind`."""
    result = types.CPointer(kind.dtype)

    def make(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(address, kind), make


@intrinsic
def _arrive(_context: Any, gate: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", at, ir.Constant(_INT64, 1), "acq_rel")

    return types.int64(gate), make


@intrinsic
def _arrived(_context: Any, gate: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(at, "acquire", 8)

    return types.int64(gate), make


@intrinsic
def _give_way(_context: Any) -> Any:
    def make(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT32, []), "sched_yield")
        return builder.call(call, [])

    return types.int32(), make


@njit(cache=True, error_model="numpy")
def meet(gate: np.ndarray, turn: int, team: int) -> int:
    """Wait until all threads of the team are here for the `turn`-th time; `gate` counts arrivals. The next turn."""
    _arrive(gate)
    looks = 0
    while _arrived(gate) < turn * team:
        looks += 1
        if looks > PATIENCE:
            _give_way()
    return turn + 1


@intrinsic
def as_float(_context: Any, _bits: Any) -> Any:
    """The float whose bits these are."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), make


@intrinsic
def as_bits(_context: Any, _number: Any) -> Any:
    """The bits of a float."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), make


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
    """A stored number as float32. The element type says how it is stored: int8 codes (their scale comes later), fp16 as
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
    """A float32 into an array, as `load` reads it."""
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
