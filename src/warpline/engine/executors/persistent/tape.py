"""Weights in the order in which the persistent kernel reads them: one tape per block, steps of a tile per warp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.kernels.persistent import STAGES, TILE_BYTES, UNIT, Plan
from warpline.model.weights import Weights

#: Where each stage's weights are in a layer; the LM head's are the model's.
_MATRICES = {
    "qkv": "attn.c_attn.weight",
    "out": "attn.c_proj.weight",
    "fc": "mlp.c_fc.weight",
    "proj": "mlp.c_proj.weight",
}
#: What the kernel reads of a layer besides, and the products behind a LayerNorm, whose other vectors become lines.
_VECTORS = ("ln_1.weight", "attn.c_proj.bias", "ln_2.weight", "mlp.c_proj.bias")
_NORMAL_PRODUCTS = (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"))


@dataclass(frozen=True, slots=True)
class Tapes:
    """What the kernel reads of a model besides its embeddings."""

    tape: Tensor  # [step, warp, element]
    vectors: Tensor
    lines: Tensor  # float32 [layer, output of QKV or FC, 2]: slope and level of persistent/layers.cuh
    plans: Tensor  # int32 [block, 12]


def record(weights: Weights, plan: Plan) -> Tapes:
    """Arrange `weights` for `plan`, on the device where they are."""
    tensors, extents = weights.tensors, plan.extents
    some = tensors["wte.weight"]
    total = plan.tape[-1] + plan.steps[-1]
    tape = some.new_zeros(total, plan.warps, TILE_BYTES // some.element_size())
    places = {stage: _places(plan, stage).to(some.device) for stage in STAGES}
    strides = torch.tensor([plan.layer_steps(b) for b in range(extents.blocks)])
    for stage, name in _MATRICES.items():
        owner = torch.repeat_interleave(torch.arange(extents.blocks), torch.tensor(plan.units[stage]))
        stride = strides[owner].to(some.device)[:, None]  # [unit, 1]: from one layer to the next
        for layer in range(extents.layers):
            found = tiles(tensors[f"h.{layer}.{name}"], plan, stage)  # [unit, warp · step, element]
            tape[places[stage] + layer * stride] = found.unflatten(1, (plan.warps, -1)).transpose(1, 2)
    head = tiles(tensors[f"{weights.head}.weight"], plan, "head")  # [unit, step, element]
    within = torch.cat([torch.arange(units) for units in plan.units["head"]]).to(some.device)
    tape[places["head"], within[:, None] % plan.warps] = head
    layers = [tensors[f"h.{layer}.{name}"] for layer in range(extents.layers) for name in _VECTORS]
    vectors = torch.cat([*layers, tensors["ln_f.weight"], tensors["ln_f.bias"]])
    lines = torch.stack([_lines(tensors, f"h.{layer}.") for layer in range(extents.layers)])
    return Tapes(tape, vectors, lines, torch.tensor(plan.rows(), dtype=torch.int32, device=some.device))


def _lines(tensors: dict[str, Tensor], h: str) -> Tensor:
    """[output, 2]: weight · gamma, and weight · beta + bias."""
    found = []
    for norm, name in _NORMAL_PRODUCTS:
        weight, bias = tensors[f"{h}{name}.weight"].double(), tensors[f"{h}{name}.bias"].double()
        affine = torch.stack([tensors[f"{h}{norm}.{part}"].double() for part in ("weight", "bias")], dim=1)
        found.append(weight @ affine + torch.stack([torch.zeros_like(bias), bias], dim=1))
    return torch.cat(found).float()


def tiles(matrix: Tensor, plan: Plan, stage: str) -> Tensor:
    """[out, in] → [unit, tile, element]: a lane's 16 bytes are neighbouring inputs of one output, in half precision
    with their second and third pair exchanged (see TileSums of persistent/product.cuh); what is missing from the last
    unit and tile is zero."""
    extents = plan.extents
    width = extents.tile_inputs // 4
    count = extents.tiles(stage) if stage == "head" else plan.steps_of(stage) * plan.warps
    padded = F.pad(matrix, (0, count * extents.tile_inputs - matrix.shape[1], 0, -matrix.shape[0] % UNIT))
    lanes = padded.view(-1, UNIT, count, 4, width).transpose(1, 2)  # [unit, tile, output, lane of four, element]
    if width == 8:
        lanes = lanes.unflatten(-1, (2, 2, 2)).transpose(-2, -3).flatten(-3)
    return lanes.flatten(2)


def _places(plan: Plan, stage: str) -> Tensor:
    """Where in the tape each unit's steps go, in the first layer: [unit, step]."""
    rows, steps = [], torch.arange(plan.steps_of(stage))
    for block in range(plan.extents.blocks):
        start = plan.tape[block] + sum(plan.block_steps(s, block) for s in STAGES[: STAGES.index(stage)])
        if stage == "head":
            start = plan.tape[block] + plan.steps[block] - plan.block_steps(stage, block)
        turns = torch.arange(plan.units[stage][block]) // (plan.warps if stage == "head" else 1)
        rows.append(start + turns[:, None] * len(steps) + steps)
    return torch.cat(rows)
