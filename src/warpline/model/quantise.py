"""int8 weights: of every row of a matrix the codes and one scale, so that row = codes * scale.

A row is an output of a product, so its scale is one multiplication behind the sum, wherever the sum is computed.
Matrices are held as [out, in] like all others; whoever reads them finds the scales under the matrix's name and SCALE.
Vectors and the position embedding stay in float32: they are a thousandth of the bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warpline.model.parameters import is_quantised

if TYPE_CHECKING:
    from warpline.model.weights import Weights

#: Behind the name of a matrix whose codes are stored.
SCALE = ".scale"
_LARGEST = 127


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The codes (int8) and the scale of each row (float32); the largest of a row is exact."""
    values = torch.empty(matrix.shape).copy_(matrix)  # row by row, however the file has it
    scale = values.abs().amax(dim=1) / _LARGEST
    codes = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return codes.clamp_(-_LARGEST, _LARGEST).to(torch.int8), scale


def place(tensors: dict[str, Tensor], name: str, value: Tensor) -> None:
    """A parameter among int8 weights: codes and scales, or float32."""
    if is_quantised(name):
        tensors[name], tensors[name + SCALE] = quantise(value)
    else:
        tensors[name] = torch.empty(value.shape).copy_(value)


def quantised(weights: Weights) -> Weights:
    """The same model in int8."""
    tensors: dict[str, Tensor] = {}
    for name, value in weights.tensors.items():
        place(tensors, name, value)
    return replace(weights, tensors=tensors)
