"""LayerNorm, activations and elementary functions, written so that the compiler vectorises them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from warpline.kernels.cpu.intrinsics import INNER, Number, as_bits, as_float, erf
from warpline.kernels.cpu.vectors import LOG2_E, alike, exponential, fused

_ONE = np.float32(1)


@intrinsic
def exp(_context: Any, _x: Any) -> Any:
    """e to the x with a relative error of 2e-7 (for x within ±87); very small results become 2^-126."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return exponential(builder, builder.fmul(arguments[0], alike(arguments[0].type, LOG2_E)))

    return types.float32(types.float32), make


@intrinsic
def plus_product(_context: Any, _total: Any, _a: Any, _b: Any) -> Any:
    """Return total + a * b, rounded once where the CPU can."""

    def make(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return fused(builder, *arguments)

    return types.float32(types.float32, types.float32, types.float32), make


@njit(**INNER)
def log(x: Number) -> Number:
    """Return the natural logarithm of a normal positive number, to a few units in the last place."""
    bits = as_bits(np.float32(x))
    # A mantissa between sqrt(1/2) and sqrt(2) keeps the polynomial short.
    shifted = bits - np.int32(0x3F3504F3)
    exponent = shifted >> np.int32(23)
    f = as_float((shifted & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)) - _ONE
    p = np.float32(7.0376836292e-2)
    p = plus_product(np.float32(-1.1514610310e-1), p, f)
    p = plus_product(np.float32(1.1676998740e-1), p, f)
    p = plus_product(np.float32(-1.2420140846e-1), p, f)
    p = plus_product(np.float32(1.4249322787e-1), p, f)
    p = plus_product(np.float32(-1.6668057665e-1), p, f)
    p = plus_product(np.float32(2.0000714765e-1), p, f)
    p = plus_product(np.float32(-2.4999993993e-1), p, f)
    p = plus_product(np.float32(3.3333331174e-1), p, f)
    rest = f * f * plus_product(np.float32(-0.5), p, f)
    return plus_product(f + rest, np.float32(exponent), np.float32(0.6931471805599453))


@njit(**(INNER | {"fastmath": True}))
def normalise(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: Number, y: np.ndarray) -> None:
    """Compute LayerNorm of a row into y."""
    count = len(x)
    total = np.float32(0)
    for i in range(count):
        total += x[i]
    mean = total / np.float32(count)
    squares = np.float32(0)
    for i in range(count):
        squares += (x[i] - mean) * (x[i] - mean)
    inverse = _ONE / np.float32(math.sqrt(squares / np.float32(count) + epsilon))
    for i in range(count):
        y[i] = (x[i] - mean) * inverse * weight[i] + bias[i]


@njit(**INNER)
def _sigmoid(x: Number) -> Number:
    return _ONE / (_ONE + exp(-x))


@njit(**INNER)
def _gelu_tanh(x: Number) -> Number:  # x (1 + tanh u) / 2 is x sigmoid(2u)
    return x * _sigmoid(np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x))


@njit(**INNER)
def _gelu(x: Number) -> Number:
    return np.float32(0.5) * x * np.float32(1 + erf(np.float64(x) * 0.7071067811865476))


@njit(**INNER)
def _relu(x: Number) -> Number:
    return max(x, np.float32(0))


@njit(**INNER)
def _silu(x: Number) -> Number:
    return x * _sigmoid(x)


@njit(**INNER)
def _tanh(x: Number) -> Number:
    return np.float32(2) * _sigmoid(np.float32(2) * x) - _ONE


#: By the names of `config.ACTIVATIONS`.
ACTIVATIONS = {"gelu_tanh": _gelu_tanh, "gelu": _gelu, "relu": _relu, "silu": _silu, "tanh": _tanh}
