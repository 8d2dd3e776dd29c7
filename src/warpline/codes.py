"""Rows of numbers as int8 codes with a scale each: row = codes * scale. The torch form of what kernels compute.

The largest number of a row is exact, and no other is off by more than half a scale. Scales are float32: fp16 would save
3 % of the bytes but lacks the range of bf16, and bf16 would round a scale by up to a quarter of a code.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
#: Rows with a smaller scale become zeros: the inverse of the scale must not overflow.
LEAST_SCALE = 1e-30


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (int8) and the scale [..., 1] (float32) of rows along the last dimension. It computes step by
    step like the kernels, in float32, so that codes are equal to the bit. A row with NaN or infinity becomes NaN."""
    rows = rows.float()
    scale = rows.abs().amax(dim=-1, keepdim=True) * (1 / LARGEST)
    inverse = torch.where(scale >= LEAST_SCALE, 1 / scale, 0.0)
    return (rows * inverse).round().nan_to_num(0.0).to(torch.int8), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the rows of these codes, in the scales' precision."""
    return codes.to(scale.dtype) * scale
