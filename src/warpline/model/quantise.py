"""int8 weights: the codes and one scale for every row of a matrix, so that row = codes * scale.

A row is an output of a product, so its scale is one multiplication after the sum, wherever the sum is computed.
Matrices are stored as [out, in] like all others; the scales have the matrix's name plus SCALE. Vectors and the position
embedding, a thousandth of the bytes, have the dtype of activations: float32 on a CPU, float16 on a GPU. Scales are
always float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warpline.codes import LARGEST
from warpline.errors import ModelError
from warpline.model.parameters import is_quantised

if TYPE_CHECKING:
    from warpline.model.weights import Weights

#: Suffix of the scales' name, after the name of the matrix.
SCALE = ".scale"
#: The file of int8 weights; no other program reads it as plain weights.
FILE = "model.int8.safetensors"
#: Rows that are in memory as float32 at once.
_ROWS = 2048
#: Dtype of activations and of unquantised parameters with int8 matrices, by device.
BESIDE_CODES = {"cpu": torch.float32, "cuda": torch.float16}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A stored matrix: row = codes * scale, or, without scales, the numbers themselves."""

    codes: Tensor
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.codes.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.codes.numel()

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix as numbers."""
        if self.scale is None:
            return self.codes.to(dtype)
        return (self.codes.float() * self.scale[:, None]).to(dtype)


def paired(source: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Matrix]]:
    """Yield the tensors of an int8 file: codes paired with their scales, the rest unchanged."""
    waiting: dict[str, Tensor] = {}
    for name, value in source:
        matrix = name.removesuffix(SCALE)
        if value.dtype != torch.int8 and matrix == name:
            yield name, value
        elif matrix in waiting:
            codes, scale = (waiting[matrix], value) if value.dtype != torch.int8 else (value, waiting[matrix])
            if codes.dtype != torch.int8 or codes.dim() != 2 or scale.shape != codes.shape[:1]:
                raise ModelError(f"{matrix} and its scales do not fit together: export the model again")
            yield matrix, Matrix(codes, scale.float())
            del waiting[matrix]
        else:
            waiting[matrix] = value
    if waiting:
        raise ModelError(f"{next(iter(waiting))} has codes or scales alone: export the model again")


def quantise(matrix: Tensor, name: str = "a matrix") -> tuple[Tensor, Tensor]:
    """Return the codes (int8) and each row's scale (float32) on the matrix's device; a row's maximum is exact."""
    codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scale = torch.empty(len(matrix), device=matrix.device)
    for some, its_scale, _, its_codes in coded(matrix):
        codes[some], scale[some] = its_codes, its_scale
    if not scale.isfinite().all():
        raise ModelError(f"{name} holds infinite numbers or NaN, which int8 cannot store: use another dtype")
    return codes, scale


def coded(matrix: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield some rows at a time in float32: their slice, their scales, the rows in units of them, their codes."""
    largest = torch.tensor(float(LARGEST), device=matrix.device)  # a GPU multiplies by the inverse of a Python number
    for first in range(0, len(matrix), _ROWS):
        some = slice(first, first + _ROWS)
        rows = torch.empty(matrix[some].shape, device=matrix.device).copy_(matrix[some])  # made contiguous
        scale = rows.abs().amax(dim=1) / largest
        rows /= scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        yield some, scale, rows, rows.round().clamp_(-LARGEST, LARGEST)


def place(tensors: dict[str, Tensor], name: str, value: Tensor | Matrix, device: torch.device) -> None:
    """Add a parameter to int8 weights on `device`: as codes and scales, or in the dtype of activations."""
    if isinstance(value, Matrix):
        assert value.scale is not None
        tensors[name], tensors[name + SCALE] = (t.to(device).contiguous() for t in (value.codes, value.scale))
    elif is_quantised(name):
        tensors[name], tensors[name + SCALE] = quantise(value.to(device), name)
    else:
        tensors[name] = torch.empty(value.shape, dtype=BESIDE_CODES[device.type], device=device).copy_(value)


def quantised(weights: Weights) -> Weights:
    """Return the same model in int8."""
    if weights.is_quantised:
        return weights
    tensors: dict[str, Tensor] = {}
    for name, value in weights.tensors.items():
        place(tensors, name, value, weights.device)
    return replace(weights, tensors=tensors)


def dequantised(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return the same model as plain numbers; int8 weights become the numbers they stand for, rounded to `dtype`."""
    names = [name for name in weights.tensors if not name.endswith(SCALE)]
    return replace(weights, tensors={name: weights.matrix(name).plain(dtype) for name in names})
