"""The noise of a draw: one contract, kept here in torch and by `gumbel_noise` of ops/sample.cuh on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gumbel(keys: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise [B, count] of the tokens 0 … count-1, a pure function of `keys` [B] (int32).

    Each token's 32 bits are an integer hash of key + token, with two rounds of multiply and shift. Exponential noise
    from them is finest near 0, where the winners come from; its negative logarithm is Gumbel noise.
    """
    import torch

    bits = keys[:, None] + torch.arange(count, dtype=torch.int32, device=keys.device)
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D  # int32 wraps around, and & makes the shift a logical one
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    bits = bits ^ (bits >> 16 & 0xFFFF)
    # The last few values would round up to 1, whose noise is -inf; no token may be impossible because of its noise.
    uniform = (((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))
