"""A second copy of a matrix in one byte per weight, with bounds on the error of its products.

For a row w of the matrix and c, its codes as numbers, |w x - c x| is at most |w - c| |x|. Both norms in the bound are
rounded up here. cuda/screen.cuh and kernels/cpu/screen.py use them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from warpline.model.quantise import coded

#: Rows of this length and more could overflow float32 in a product; their bounds are infinite.
_LONGEST = 1e18


@dataclass(frozen=True, slots=True)
class Screen:
    """Codes and bounds for every row of a matrix."""

    codes: Tensor  # int8 [row, column]
    scale: Tensor  # float32 [row]
    error: Tensor  # float32 [row]: |w - c|, or more
    norm: Tensor  # float32 [row]: |w| and |c|, or more

    @staticmethod
    def of(matrix: Tensor) -> Screen:
        """Screen a matrix on its device. Rows that are not finite, too long or too short get infinite bounds."""
        codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        scale, error, norm = torch.empty(3, len(matrix), device=matrix.device)
        # In units of a scale no square overflows or vanishes. Sums round, and so did the division by the scale.
        spread, rounded = 1 + matrix.shape[1] * 2.0**-23, 2.0**-22
        for some, its_scale, rows, its_codes in coded(matrix):
            codes[some], scale[some] = its_codes, its_scale
            length, off = rows.norm(dim=1) * spread, (rows - its_codes).norm(dim=1) * spread
            error[some] = _up((off + rounded * length) * its_scale)
            norm[some] = _up((off + length) * its_scale)
        vanishing = (scale > 0) & (scale < torch.finfo(torch.float32).tiny)
        unknown = ~(error + norm < _LONGEST) | vanishing
        codes[unknown], scale[unknown] = 0, 0.0
        error[unknown], norm[unknown] = math.inf, math.inf
        return Screen(codes, scale, error, norm)


def _up(x: Tensor) -> Tensor:
    """Increase x slightly, beyond the rounding of the last few operations."""
    return torch.nextafter(x * (1 + 2.0**-20), torch.tensor(math.inf, device=x.device))


def upper_half(x: Tensor) -> Tensor:
    """Return the upper 16 bits of non-negative float32 numbers, rounded up, as int32."""
    return (x.view(torch.int32) + 0xFFFF) >> 16
