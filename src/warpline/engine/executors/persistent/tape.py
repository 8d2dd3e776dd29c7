"""Arranges weights in the order in which the persistent kernel reads them: one tape per block, steps of a tile per
warp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.kernels.decode_plan import CODE_INPUTS, CODE_UNIT, STAGES, TILE_BYTES, UNIT, Plan
from warpline.kernels.persistent import FINAL_VECTORS, VECTORS
from warpline.model.screen import Screen, upper_half
from warpline.model.weights import Weights

#: Names of each stage's weights in a layer; the LM head belongs to the model.
_MATRICES = {
    "qkv": "attn.c_attn.weight",
    "out": "attn.c_proj.weight",
    "fc": "mlp.c_fc.weight",
    "proj": "mlp.c_proj.weight",
}
#: Products after a LayerNorm. The LayerNorm's bias and the product's bias become part of `norm_terms`.
_NORMAL_PRODUCTS = (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"))


@dataclass(frozen=True, slots=True)
class Tapes:
    """What the kernel reads of a model besides its embeddings."""

    tape: Tensor  # uint8 [step, warp, byte]
    vectors: Tensor
    norm_terms: Tensor  # float32 [layer, output of QKV or FC, number]: slope, level and (codes) scale
    scales: Tensor  # float32 [layer, output of both projections]: scales of codes, else empty
    plans: Tensor  # int32 [block, 14]


def record(weights: Weights, plan: Plan) -> Tapes:
    """Arrange `weights` for `plan`, on their device."""
    tensors, extents = weights.tensors, plan.extents
    tape = torch.zeros(plan.steps, plan.warps, TILE_BYTES, dtype=torch.uint8, device=weights.device)
    strides = torch.tensor([plan.layer_steps(b) for b in range(extents.blocks)], device=weights.device)
    for stage, name in _MATRICES.items():
        owner, step, warp = (index.to(weights.device) for index in _places(plan, stage))  # [unit, tile]
        for layer in range(extents.layers):
            found = tiles(tensors[f"h.{layer}.{name}"], step.shape[1], extents.tile_inputs(stage)).view(torch.uint8)
            tape[step + layer * strides[owner], warp] = found  # [unit, tile, byte]
    head = weights.matrix(f"{weights.head}.weight").plain(weights.activations)
    units = tiles(head, extents.tiles("head"), extents.tile_inputs("head")).view(torch.uint8)
    _deal(tape, plan, units, units[:, :0], plan.head_parts, CODE_UNIT // UNIT, 0)
    codes = code_tiles(Screen.of(head))
    _deal(tape, plan, codes[:, :-1], codes[:, -1:], plan.code_parts, 1, 1)
    layers = [tensors[f"h.{layer}.{name}"] for layer in range(extents.layers) for name in VECTORS]
    vectors = torch.cat([*layers, *(tensors[name] for name in FINAL_VECTORS)])
    norm_terms = torch.stack([_norm_terms(weights, f"h.{layer}.") for layer in range(extents.layers)])
    matrices = [weights.matrix(f"h.{layer}.{_MATRICES[s]}") for layer in range(extents.layers) for s in ("out", "proj")]
    scales = torch.cat([norm_terms.new_empty(0), *(m.scale for m in matrices if m.scale is not None)])
    return Tapes(tape, vectors, norm_terms, scales, torch.tensor(plan.rows(), dtype=torch.int32, device=weights.device))


def _norm_terms(weights: Weights, h: str) -> Tensor:
    """Return [output, 2]: weight · gamma, and weight · beta + bias; with codes, their scale as a third column."""
    found = []
    for norm, name in _NORMAL_PRODUCTS:
        matrix, bias = weights.matrix(f"{h}{name}.weight"), weights.tensors[f"{h}{name}.bias"].double()
        affine = torch.stack([weights.tensors[f"{h}{norm}.{part}"].double() for part in ("weight", "bias")], dim=1)
        line = matrix.plain(torch.float64) @ affine + torch.stack([torch.zeros_like(bias), bias], dim=1)
        found.append(line if matrix.scale is None else torch.cat([line, matrix.scale[:, None]], dim=1))
    return torch.cat(found).float()


def tiles(matrix: Tensor, count: int, inputs: int) -> Tensor:
    """Return a matrix [out, in] as `count` tiles of `inputs` inputs: [unit, tile, element], padded with zeros.

    A lane's 16 bytes are neighbouring inputs of one output, in the order that TileSums of persistent/product.cuh needs.
    In half precision the second and third pair are exchanged. With codes each pair of the first eight is followed by
    one of the others."""
    padded = F.pad(matrix, (0, count * inputs - matrix.shape[1], 0, -matrix.shape[0] % UNIT))
    lanes = padded.view(-1, UNIT, count, 4, inputs // 4).transpose(1, 2)  # [unit, tile, output, lane of four, element]
    if matrix.element_size() < 4:
        lanes = lanes.unflatten(-1, (2, -1, 2)).transpose(-2, -3).flatten(-3)
    return lanes.flatten(2)


def code_tiles(screen: Screen) -> Tensor:
    """Return codes as [unit, tile, byte], in the order of `screen` in persistent/head.cuh: a lane has four inputs of
    outputs g and g + 8 each, then the next four. The last tile has the outputs' scales, then error and norm of each."""
    missing = -len(screen.codes) % CODE_UNIT
    padded = F.pad(screen.codes, (0, -screen.codes.shape[1] % CODE_INPUTS, 0, missing))
    parts = padded.view(-1, 2, 8, padded.shape[1] // CODE_INPUTS, 4, 2, 4)  # [unit, half, g, tile, t, of eight, input]
    codes = parts.permute(0, 3, 2, 4, 5, 1, 6).flatten(2)
    both = upper_half(screen.norm) << 16 | upper_half(screen.error)
    numbers = F.pad(torch.stack([screen.scale.view(torch.int32), both]), (0, missing)).view(2, -1, 2, 8)
    known = numbers.permute(1, 3, 0, 2)[:, :, None].expand(-1, -1, 4, -1, -1)  # [unit, g, t, number, half]
    return torch.cat([codes.view(torch.uint8), known.flatten(1)[:, None].contiguous().view(torch.uint8)], dim=1)


def _places(plan: Plan, stage: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the place of each tile of a unit on the tape, in the first layer: block, step and warp, [unit, tile].
    Neighbouring tiles belong to one warp."""
    steps = plan.steps_of(stage)
    owner = torch.repeat_interleave(torch.arange(plan.extents.blocks), torch.tensor(plan.units[stage]))[:, None]
    unit = torch.arange(len(owner))[:, None] - torch.tensor(plan.first[stage])[owner]
    tile = torch.arange(steps * plan.warps)
    step = _begin(plan, stage)[owner] + unit * steps + tile % steps
    return owner, step, (tile // steps).expand_as(step)


def _begin(plan: Plan, stage: str) -> Tensor:
    """Return the step at which each block begins a stage in the first layer."""
    before = STAGES[: STAGES.index(stage)]
    return torch.tensor(
        [start + sum(plan.block_steps(s, block) for s in before) for block, start in enumerate(plan.tape)]
    )


def _deal(tape: Tensor, plan: Plan, found: Tensor, known: Tensor, parts: int, each: int, which: int) -> None:
    """Write units of the LM head or of its codes, [unit, tile, byte], to the tape, for the warps of each block in turn.

    `each`: units per unit of the plan. `known`: tiles that follow each unit. `which`: the first or the second part
    after the layers. In the last turn `parts` warps share a unit."""
    first = 0
    for block, row in enumerate(plan.rows()):
        end = first + each * plan.units["head"][block]
        at = row[0] + sum(row[1 : 2 + which])
        while first < end:
            count = min(plan.warps, end - first)
            some, also = found[first : first + count], known[first : first + count]  # the last unit may be missing
            if parts > 1 and count < plan.warps:
                steps = -(-some.shape[1] // parts)
                some = F.pad(some, (0, 0, 0, parts * steps - some.shape[1])).view(
                    parts * len(some), steps, some.shape[2]
                )
                also = also.repeat_interleave(parts, 0)
            whole = torch.cat([some, also], dim=1)  # [warp, step, byte]
            tape[at : at + whole.shape[1], : len(whole)] = whole.transpose(0, 1)
            at, first = at + whole.shape[1], first + count
