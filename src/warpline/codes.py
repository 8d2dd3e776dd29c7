"""Rows of numbers as int8 codes with a scale each: row = codes * scale. What kernels repeat on the device, in torch.

The largest number of a row is exact, and no other is off by more than half a scale. Scales are float32: those of fp16
would save 3 % of the bytes but lack the range of bf16, which itself would round a scale by up to a quarter of a code.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
#: Rows with a smaller scale count as zeros: one over it must not overflow.
LEAST_SCALE = 1e-30


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The codes (int8) and the scale [..., 1] (float32) of rows along the last dimension. Computed as kernels do, in
    float32 and step by step, so that codes are the same to the bit. A row with a NaN or an infinity becomes NaNs."""
    rows = rows.float()
    scale = rows.abs().amax(dim=-1, keepdim=True) * (1 / LARGEST)
    inverse = torch.where(scale >= LEAST_SCALE, 1 / scale, 0.0)
    return (rows * inverse).round().nan_to_num(0.0).to(torch.int8), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """The rows again, in the scales' precision."""
    return codes.to(scale.dtype) * scale
