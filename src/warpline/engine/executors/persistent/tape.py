"""Weights in the order in which the persistent kernel reads them: one tape per block, steps of a tile per warp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.kernels.decode_plan import CODE_INPUTS, CODE_UNIT, STAGES, TILE_BYTES, UNIT, Plan
from warpline.model.screen import Screen, upper_half
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

    tape: Tensor  # uint8 [step, warp, byte]
    vectors: Tensor
    lines: Tensor  # float32 [layer, output of QKV or FC, 2]: slope and level of persistent/layers.cuh
    plans: Tensor  # int32 [block, 14]


def record(weights: Weights, plan: Plan) -> Tapes:
    """Arrange `weights` for `plan`, on the device where they are."""
    tensors, extents = weights.tensors, plan.extents
    some = tensors["wte.weight"]
    tape = torch.zeros(plan.steps, plan.warps, TILE_BYTES, dtype=torch.uint8, device=some.device)
    strides = torch.tensor([plan.layer_steps(b) for b in range(extents.blocks)])
    for stage, name in _MATRICES.items():
        places = _places(plan, stage).to(some.device)
        owner = torch.repeat_interleave(torch.arange(extents.blocks), torch.tensor(plan.units[stage]))
        stride = strides[owner].to(some.device)[:, None]  # [unit, 1]: from one layer to the next
        for layer in range(extents.layers):
            count = plan.steps_of(stage) * plan.warps
            found = tiles(tensors[f"h.{layer}.{name}"], plan, count).view(torch.uint8)  # [unit, warp · step, byte]
            tape[places + layer * stride] = found.unflatten(1, (plan.warps, -1)).transpose(1, 2)
    head = tensors[f"{weights.head}.weight"]
    _deal(tape, plan, tiles(head, plan, extents.tiles("head")).view(torch.uint8), CODE_UNIT // UNIT, 0)
    _deal(tape, plan, code_tiles(Screen.of(head)), 1, 1)
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


def tiles(matrix: Tensor, plan: Plan, count: int) -> Tensor:
    """[out, in] → [unit, tile, element] of `count` tiles: a lane's 16 bytes are neighbouring inputs of one output, in
    half precision with their second and third pair exchanged (see TileSums of persistent/product.cuh); what is
    missing from the last unit and tile is zero."""
    extents = plan.extents
    width = extents.tile_inputs // 4
    padded = F.pad(matrix, (0, count * extents.tile_inputs - matrix.shape[1], 0, -matrix.shape[0] % UNIT))
    lanes = padded.view(-1, UNIT, count, 4, width).transpose(1, 2)  # [unit, tile, output, lane of four, element]
    if width == 8:
        lanes = lanes.unflatten(-1, (2, 2, 2)).transpose(-2, -3).flatten(-3)
    return lanes.flatten(2)


def code_tiles(screen: Screen) -> Tensor:
    """[unit, tile, byte], as `screen` of persistent/head.cuh takes it: a lane has of outputs g and g + 8 four inputs
    each, then the next four. The last tile has the outputs' scales, then error and norm of each."""
    missing = -len(screen.codes) % CODE_UNIT
    padded = F.pad(screen.codes, (0, -screen.codes.shape[1] % CODE_INPUTS, 0, missing))
    parts = padded.view(-1, 2, 8, padded.shape[1] // CODE_INPUTS, 4, 2, 4)  # [unit, half, g, tile, t, of eight, input]
    codes = parts.permute(0, 3, 2, 4, 5, 1, 6).flatten(2)
    both = upper_half(screen.norm) << 16 | upper_half(screen.error)
    numbers = F.pad(torch.stack([screen.scale.view(torch.int32), both]), (0, missing)).view(2, -1, 2, 8)
    known = numbers.permute(1, 3, 0, 2)[:, :, None].expand(-1, -1, 4, -1, -1)  # [unit, g, t, number, half]
    return torch.cat([codes.view(torch.uint8), known.flatten(1)[:, None].contiguous().view(torch.uint8)], dim=1)


def _places(plan: Plan, stage: str) -> Tensor:
    """Where in the tape each unit's steps go, in the first layer: [unit, step]."""
    rows, steps = [], torch.arange(plan.steps_of(stage))
    for block in range(plan.extents.blocks):
        start = plan.tape[block] + sum(plan.block_steps(s, block) for s in STAGES[: STAGES.index(stage)])
        rows.append(start + torch.arange(plan.units[stage][block])[:, None] * len(steps) + steps)
    return torch.cat(rows)


def _deal(tape: Tensor, plan: Plan, found: Tensor, each: int, which: int) -> None:
    """Units of the LM head or of its codes, [unit, step, byte], of which one of the plan's has `each`, to the warps of
    each block in turn: the first or the second part behind the layers."""
    first = 0
    for block, row in enumerate(plan.rows()):
        units = found[first : first + each * plan.units["head"][block]]
        first += len(units)
        begin = row[0] + sum(row[1 : 2 + which])
        for turn in range(0, len(units), plan.warps):
            some = units[turn : turn + plan.warps]
            at = begin + turn // plan.warps * found.shape[1]
            tape[at : at + found.shape[1], : len(some)] = some.transpose(0, 1)
