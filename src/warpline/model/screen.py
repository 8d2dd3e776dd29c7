"""A matrix a second time in one byte for each weight, with what that leaves uncertain about its products.

For rows w of the matrix and c of what the codes mean, |w x - c x| is at most |w - c| |x|. Both norms that a bound needs
are rounded up here. cuda/screen.cuh and kernels/cpu/screen.py say what they are used for.
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
    """Of every row of a matrix."""

    codes: Tensor  # int8 [row, column]
    scale: Tensor  # float32 [row]
    error: Tensor  # float32 [row]: |w - c|, or more
    norm: Tensor  # float32 [row]: |w| and |c|, or more

    @staticmethod
    def of(matrix: Tensor) -> Screen:
        """On the device where the matrix is. Of rows that are not finite, or too long or too short, nothing is said."""
        codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        scale, error, norm = torch.empty(3, len(matrix), device=matrix.device)
        # In units of a scale no square overflows or vanishes. Sums round off, and so did the division by the scale.
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
    """A little more, whatever the last few operations have rounded."""
    return torch.nextafter(x * (1 + 2.0**-20), torch.tensor(math.inf, device=x.device))


def upper_half(x: Tensor) -> Tensor:
    """The first 16 bits of float32 numbers that are not negative, as int32: no less than the numbers."""
    return (x.view(torch.int32) + 0xFFFF) >> 16
