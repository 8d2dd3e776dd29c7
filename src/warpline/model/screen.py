"""A matrix a second time in one byte for each weight, with what that leaves uncertain about its products.

For rows w of the matrix and c of what the codes mean, |w x - c x| is at most |w - c| |x|. Both norms that a bound needs
are known here to many digits and rounded up. cuda/screen.cuh and kernels/cpu say what they are used for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from warpline.model.quantise import quantise

#: Rows of this length and more could overflow float32 in a product; their bounds are infinite.
_LONGEST = 1e18
_ROWS = 4096  # at once


@dataclass(frozen=True, slots=True)
class Screen:
    """Of every row of a matrix."""

    codes: Tensor  # int8 [row, column]
    scale: Tensor  # float32 [row]
    error: Tensor  # float32 [row]: |w - c|, or more
    norm: Tensor  # float32 [row]: |w| and |c|, or more

    @staticmethod
    def of(matrix: Tensor) -> Screen:
        """On the device where the matrix is. Of rows that are not finite, or too long, nothing is said."""
        codes, scale = quantise(matrix)
        error, norm = torch.empty_like(scale), torch.empty_like(scale)
        for first in range(0, len(matrix), _ROWS):
            some = slice(first, first + _ROWS)
            exact, coded = matrix[some].double(), codes[some].double() * scale[some].double()[:, None]
            lengths = torch.stack([(exact - coded).norm(dim=1), exact.norm(dim=1), coded.norm(dim=1)])
            error[some], norm[some] = _up(lengths[0]), _up(lengths[1:].amax(dim=0))
        unknown = ~(error + norm < _LONGEST)
        codes[unknown], scale[unknown] = 0, 0.0
        error[unknown], norm[unknown] = math.inf, math.inf
        return Screen(codes, scale, error, norm)


def _up(x: Tensor) -> Tensor:
    """As float32, no less than it is, sums of a few thousand squares included."""
    return torch.nextafter((x * (1 + 1e-9)).float(), torch.tensor(math.inf, device=x.device))


def upper_half(x: Tensor) -> Tensor:
    """The first 16 bits of float32 numbers that are not negative, as int32: no less than the numbers."""
    return (x.view(torch.int32) + 0xFFFF) >> 16
