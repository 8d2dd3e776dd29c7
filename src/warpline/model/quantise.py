"""int8 weights: of every row of a matrix the codes and one scale, so that row = codes * scale.

A row is an output of a product, so its scale is one multiplication behind the sum, wherever the sum is computed.
Matrices are held as [out, in] like all others; whoever reads them finds the scales under the matrix's name and SCALE.
Vectors and the position embedding stay in float32: they are a thousandth of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warpline.errors import ModelError
from warpline.model.parameters import is_quantised

if TYPE_CHECKING:
    from warpline.model.weights import Weights

#: Behind the name of a matrix whose codes are stored.
SCALE = ".scale"
#: The file that holds such weights: not one that anybody else would read as plain ones.
FILE = "model.int8.safetensors"
_LARGEST = 127
#: Rows that are in memory as float32 at once.
_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix as it is kept: row = codes * scale."""

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.codes.shape)

    def numel(self) -> int:
        """As a tensor's."""
        return self.codes.numel()

    def plain(self) -> Tensor:
        """In float32."""
        return self.codes.float() * self.scale[:, None]


def paired(source: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Packed]]:
    """The tensors of such a file: codes with their scales, the rest as it is."""
    waiting: dict[str, Tensor] = {}
    for name, value in source:
        matrix = name.removesuffix(SCALE)
        if value.dtype != torch.int8 and matrix == name:
            yield name, value
        elif matrix in waiting:
            codes, scale = (waiting[matrix], value) if value.dtype != torch.int8 else (value, waiting[matrix])
            if codes.dtype != torch.int8 or codes.dim() != 2 or scale.shape != codes.shape[:1]:
                raise ModelError(f"{matrix} and its scales do not fit together: export the model again")
            yield matrix, Packed(codes, scale.float())
            del waiting[matrix]
        else:
            waiting[matrix] = value
    if waiting:
        raise ModelError(f"{next(iter(waiting))} has codes or scales alone: export the model again")


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The codes (int8) and the scale of each row (float32); the largest of a row is exact."""
    codes, scale = torch.empty(matrix.shape, dtype=torch.int8), torch.empty(len(matrix))
    for some, its_scale, _, its_codes in coded(matrix):
        codes[some], scale[some] = its_codes, its_scale
    return codes, scale


def coded(matrix: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some rows at a time: which, the scale of each, the rows in units of it, and these rounded to codes; float32."""
    for first in range(0, len(matrix), _ROWS):
        some = slice(first, first + _ROWS)
        rows = torch.empty(matrix[some].shape, device=matrix.device).copy_(matrix[some])  # however a file has it
        scale = rows.abs().amax(dim=1) / _LARGEST
        rows /= scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        yield some, scale, rows, rows.round().clamp_(-_LARGEST, _LARGEST)


def place(tensors: dict[str, Tensor], name: str, value: Tensor | Packed) -> None:
    """A parameter among int8 weights: codes and scales, or float32."""
    if isinstance(value, Packed):
        tensors[name], tensors[name + SCALE] = value.codes.contiguous(), value.scale.contiguous()
    elif is_quantised(name):
        tensors[name], tensors[name + SCALE] = quantise(value)
    else:
        tensors[name] = torch.empty(value.shape).copy_(value)


def quantised(weights: Weights) -> Weights:
    """The same model in int8."""
    tensors: dict[str, Tensor] = {}
    for name, value in weights.tensors.items():
        place(tensors, name, value)
    return replace(weights, tensors=tensors)
