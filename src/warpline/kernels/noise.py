"""The noise of a draw, in numpy and torch. `noise_key` of ops/admit.cuh and `gumbel_noise` of ops/sample.cuh are the
same functions on the device, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

#: A numpy array or a tensor of int64, both of which wrap around.
A = TypeVar("A", "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", "Tensor")


def splitmix(stream: A, at: A) -> A:
    """Return entry `at` of the splitmix64 sequence of `stream`: 64 bits each."""
    z = stream + (at + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: A, bits: int) -> A:
    """Logical right shift: zeros enter from the left."""
    return z >> bits & (1 << 64 - bits) - 1


def _signed(bits: int) -> int:
    return bits - (bits >> 63 << 64)


def noise_keys(stream: np.ndarray, count: int) -> np.ndarray:
    """Return the keys of a sequence's first `count` draws, int32 [n, count], for `stream` [n] (uint64): the lower
    halves of its splitmix64 sequence."""
    import numpy as np

    signed = stream.astype(np.uint64).view(np.int64)
    return splitmix(signed[:, None], np.arange(count, dtype=np.int64)).astype(np.int32)


def gumbel(keys: Tensor, count: int) -> Tensor:
    """Return standard Gumbel noise [B, count] of the tokens 0 … count-1, a pure function of `keys` [B] (int32).

    Each token's 32 bits are an integer hash of key + token, with two rounds of multiply and shift. They become
    exponential noise, which is finest near 0, where the largest Gumbel noise comes from; its negative logarithm is
    Gumbel noise.
    """
    import torch

    bits = keys[:, None] + torch.arange(count, dtype=torch.int32, device=keys.device)
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D  # int32 wraps around; & makes the shift a logical one
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    bits = bits ^ (bits >> 16 & 0xFFFF)
    # The last few values would round up to 1, with noise -inf; noise must not make a token impossible.
    uniform = (((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))
