"""Parameters as the compiled code reads them: matrices in panels (kernels/cpu/panels.py), vectors in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.kernels.cpu.sizes import PANEL, QUAD

_POSITIONS = "wpe.weight"


def in_panels(matrix: Tensor) -> Tensor:
    """Return a matrix as [panel, input, output], or int8 codes as [panel, inputs / QUAD, output, QUAD], padded with
    zeros."""
    outputs, inputs = matrix.shape
    quad = QUAD if matrix.dtype == torch.int8 else 1
    panels, quads = -(-outputs // PANEL), -(-inputs // quad)
    made = matrix.new_zeros(panels, quads, PANEL, quad)
    for panel in range(panels):
        some = matrix[panel * PANEL : (panel + 1) * PANEL]
        whole = F.pad(some, (0, quads * quad - inputs))
        made[panel, :, : len(some)] = whole.view(len(some), quads, quad).transpose(0, 1)
    return made


def padded(vector: Tensor) -> Tensor:
    """Return the vector in float32, padded to whole panels."""
    return F.pad(vector.float(), (0, -len(vector) % PANEL)).contiguous()


def panelled(tensors: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """Return a model's parameters; an LM head in floating point, and embeddings, are not rearranged."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name == _POSITIONS:
            found[name] = value.float().contiguous()
        elif value.dim() == 1:
            found[name] = padded(value)
        elif value.dtype == torch.int8 or name not in (f"{head}.weight", "wte.weight"):
            found[name] = in_panels(value)
        else:
            found[name] = value
    return found
