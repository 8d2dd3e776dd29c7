"""The tape of the persistent kernel: every weight is on it once, at the expected place, for any model and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from warpline.engine.executors.persistent.executor import PersistentExecutor
from warpline.engine.executors.persistent.tape import record
from warpline.engine.slots import Slots
from warpline.kernels.decode_plan import CODE_UNIT, PAUSES, STAGES, UNIT, Extents, Plan, best_warps, plan
from warpline.kernels.persistent import Arguments
from warpline.model.quantise import SCALE, quantised
from warpline.model.screen import Screen
from warpline.model.weights import Weights, load

NAMES = {"qkv": "attn.c_attn", "out": "attn.c_proj", "fc": "mlp.c_fc", "proj": "mlp.c_proj"}


def lanes(tile: torch.Tensor, size: int) -> torch.Tensor:
    """Return what the lanes of a warp hold of a tile, as eight outputs of `size` inputs. In half precision the middle
    pairs are swapped; pairs of codes alternate with those of the other half."""
    if size == 16:
        return tile.view(UNIT, size)
    if size == 64:
        return tile.view(UNIT, 4, 4, 2, 2).transpose(2, 3).reshape(UNIT, size)
    return tile.view(UNIT, 4, 4, 2)[:, :, [0, 2, 1, 3]].reshape(UNIT, size)


def read(tape: torch.Tensor, made: Plan, stage: str, layer: int) -> torch.Tensor:
    """Read a layer's matrix in the kernel's order: block by block, unit by unit, step by step, warp by warp."""
    e, size = made.extents, made.extents.tile_inputs(stage)
    matrix = torch.zeros(e.units(stage) * UNIT, made.steps_of(stage) * made.warps * size)
    for block in range(e.blocks):
        step = made.tape[block] + layer * made.layer_steps(block)
        step += sum(made.block_steps(before, block) for before in STAGES[: STAGES.index(stage)])
        for unit in range(made.units[stage][block]):
            row = (made.first[stage][block] + unit) * UNIT
            for i in range(made.steps_of(stage)):
                for warp in range(made.warps):
                    column = (warp * made.steps_of(stage) + i) * size  # a warp's columns are adjacent
                    at = tape[step + unit * made.steps_of(stage) + i, warp]
                    matrix[row : row + UNIT, column : column + size] = lanes(at, size)
    return matrix


def head_tiles(made: Plan, tape: torch.Tensor, *, codes: bool) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield for every unit of the LM head, or of its codes, its first output, the number of a tile, and the tile. Units
    come turn by turn; in the last turn several warps may share one."""
    e, warps = made.extents, made.warps
    size, each, known = (CODE_UNIT, 1, 1) if codes else (UNIT, 2, 0)
    tiles, parts = (e.code_tiles - 1, made.code_parts) if codes else (e.tiles("head"), made.head_parts)
    for block in range(e.blocks):
        begin = made.tape[block] + e.layers * made.layer_steps(block) + (made.head_steps(block) if codes else 0)
        units = each * made.units["head"][block]
        for unit in range(units):
            turn, warp = divmod(unit, warps)
            at, output = begin + turn * (tiles + known), made.first["head"][block] * CODE_UNIT + unit * size
            shared = parts if units - turn * warps < warps else 1
            own = -(-tiles // shared)
            for i in range(tiles):
                yield output, i, tape[at + i % own, warp * shared + i // own]
            for i in range(known):
                for part in range(shared):
                    yield output, tiles + i, tape[at + own + i, warp * shared + part]


def in_codes(weights: Weights) -> Weights:
    """Int8 weights on a GPU: half precision besides codes and scales."""
    tensors = quantised(weights).tensors
    halves = {n: t.half() for n, t in tensors.items() if t.dtype != torch.int8 and not n.endswith(SCALE)}
    return replace(weights, tensors=tensors | halves)


@pytest.mark.parametrize("blocks", [1, 2, 40])
def test_every_code_is_where_the_kernel_reads_it(blocks: int) -> None:
    weights = in_codes(load("random:n_layer=2,n_head=3,n_embd=48,n_positions=64,vocab_size=203"))
    extents = Extents("fp16", 48, 192, 3, 2, 203, 1, blocks, "sm_90", coded=True)
    made = plan(extents)
    tapes = record(weights, made)
    for stage in STAGES[:-1]:
        for layer in range(2):
            expected = weights.tensors[f"h.{layer}.{NAMES[stage]}.weight"].float()
            found = read(tapes.tape.view(torch.int8).float(), made, stage, layer)
            assert torch.equal(found[: len(expected), : expected.shape[1]], expected), (stage, layer)
    head, size = torch.zeros(203 + CODE_UNIT, 64), extents.tile_inputs("head")
    for output, i, tile in head_tiles(made, tapes.tape.view(torch.float16).float(), codes=False):
        head[output : output + UNIT, i * size : (i + 1) * size] += lanes(tile, size)
    assert torch.equal(head[:203, :48], weights.matrix("wte.weight").plain(torch.float16).float())
    assert tapes.scales.shape == (2 * 2 * 48,)
    assert torch.equal(tapes.scales[3 * 48 :], weights.tensors["h.1.mlp.c_proj.weight.scale"])
    assert torch.equal(tapes.norm_terms[1, 144:, 2], weights.tensors["h.1.mlp.c_fc.weight.scale"])


@pytest.mark.parametrize("blocks", [1, 2, 5, 40])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_every_weight_is_where_the_kernel_reads_it(blocks: int, dtype: str) -> None:
    weights = load("random:n_layer=3,n_head=3,n_embd=48,n_positions=64,vocab_size=203", dtype=dtype)
    extents = Extents(dtype, 48, 192, 3, 3, 203, 1, blocks, "sm_90")
    made = plan(extents)
    tapes = record(weights, made)
    tape = tapes.tape.view(weights.tensors["wte.weight"].dtype).float()
    for stage in STAGES[:-1]:
        for layer in range(3):
            expected = weights.tensors[f"h.{layer}.{NAMES[stage]}.weight"].float()
            found = read(tape, made, stage, layer)
            assert torch.equal(found[: len(expected), : expected.shape[1]], expected), (stage, layer)
            assert found.abs().sum() == pytest.approx(float(expected.abs().sum()))
    head, size = torch.zeros(203 + CODE_UNIT, 64), extents.tile_inputs("head")
    for output, i, tile in head_tiles(made, tape, codes=False):
        head[output : output + UNIT, i * size : (i + 1) * size] += lanes(tile, size)
    assert torch.equal(head[:203, :48], weights.tensors["wte.weight"].float())
    assert not head[203:].any()
    assert not head[:, 48:].any()
    assert tapes.vectors.numel() == 3 * 4 * 48 + 2 * 48


@pytest.mark.parametrize("blocks", [1, 3, 5, 40])
def test_codes_and_their_bounds_are_where_the_kernel_reads_them(blocks: int) -> None:
    weights = load("random:n_layer=1,n_head=3,n_embd=48,n_positions=64,vocab_size=203", dtype="fp16")
    made = plan(Extents("fp16", 48, 192, 3, 1, 203, 1, blocks, "sm_90"))
    expected = Screen.of(weights.tensors["wte.weight"])
    codes, known = torch.zeros(224, 64, dtype=torch.int8), torch.zeros(224, 2, dtype=torch.int32)
    for output, i, tile in head_tiles(made, record(weights, made).tape, codes=True):
        lane = tile.view(8, 4, 16)  # g, t: bytes of outputs g and g + 8
        for half in range(2):
            rows = slice(output + half * 8, output + half * 8 + 8)
            if i == made.extents.code_tiles - 1:
                numbers = lane.contiguous().view(torch.int32)
                assert (numbers == numbers[:, :1]).all()  # the same for the four lanes of an output
                known[rows] = numbers[:, 0, half::2]
            else:
                four = lane.view(8, 4, 2, 2, 4)[:, :, :, half]  # of eight neighbours the first four and the others
                codes[rows, i * 32 : i * 32 + 32] = four.reshape(8, 32).view(torch.int8)
    assert torch.equal(codes[:203, :48], expected.codes)
    assert not codes[203:].any()
    assert not codes[:, 48:].any()
    assert torch.equal(known[:203, 0].view(torch.float32), expected.scale)
    for number, bits in ((expected.error, known[:203, 1] << 16), (expected.norm, known[:203, 1] & -65536)):
        found = bits.contiguous().view(torch.float32)
        assert (found >= number).all()
        assert (found <= 1.008 * number).all()


@given(
    vocab=st.integers(1, 1200), blocks=st.integers(1, 60), warps=st.sampled_from([0, 8, 10, 12, 13]),
    dtype=st.sampled_from(["fp32", "fp16"]),
)  # fmt: skip
@example(vocab=97, blocks=1, warps=13, dtype="fp32")  # the last unit of the last turn is missing
@settings(max_examples=25)
def test_the_head_is_whole_whoever_shares_its_units(vocab: int, blocks: int, warps: int, dtype: str) -> None:
    """For any number of units in the last turn."""
    weights = load(f"random:n_layer=1,n_head=1,n_embd=64,n_positions=8,vocab_size={vocab}", dtype=dtype)
    made = plan(Extents(dtype, 64, 256, 1, 1, vocab, 1, blocks, "sm_90", warps=warps))
    recorded, size = record(weights, made).tape, made.extents.tile_inputs("head")
    head, codes = torch.zeros(vocab + 32, 64), torch.zeros(vocab + 32, 64, dtype=torch.int8)
    kind = weights.tensors["wte.weight"].dtype
    for output, i, tile in head_tiles(made, recorded.view(kind).float(), codes=False):
        head[output : output + UNIT, i * size : (i + 1) * size] = lanes(tile, size)
    assert torch.equal(head[:vocab], weights.tensors["wte.weight"].float())
    for output, i, tile in head_tiles(made, recorded, codes=True):
        for half in range(2 if i < made.extents.code_tiles - 1 else 0):
            rows = slice(output + half * 8, output + half * 8 + 8)
            four = tile.view(8, 4, 2, 2, 4)[:, :, :, half]
            codes[rows, i * 32 : i * 32 + 32] = four.reshape(8, 32).view(torch.int8)
    assert torch.equal(codes[:vocab], Screen.of(weights.tensors["wte.weight"]).codes)


@given(
    heads=st.integers(1, 25), depth=st.sampled_from([8, 16, 64, 80]), blocks=st.integers(1, 150),
    layers=st.integers(1, 48), dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
)  # fmt: skip
@settings(max_examples=50)
def test_plans_are_whole_and_even(heads: int, depth: int, blocks: int, layers: int, dtype: str) -> None:
    width = heads * depth
    extents = Extents(dtype, width, 4 * width, heads, layers, 50257, 1, blocks, "sm_90")
    made = plan(extents)
    for stage in STAGES:
        assert sum(made.units[stage]) == extents.units(stage)
        ends = [a + n for a, n in zip(made.first[stage], made.units[stage], strict=True)]
        assert made.first[stage] == [0, *ends[:-1]]
    loads = [made.layer_steps(block) for block in range(blocks)]
    coarsest = max(made.steps_of(stage) for stage in STAGES[:-1])
    assert max(loads) - min(loads) <= 2 * coarsest
    lengths = [sum(row[1:4]) for row in made.rows()]
    assert made.tape == [sum(lengths[:block]) for block in range(blocks)]
    assert made.steps == sum(lengths)
    if blocks <= sum(extents.units(stage) for stage in STAGES[:-1]):
        assert min(loads) > 0


@pytest.mark.parametrize(("dtype", "most"), [("fp16", 0.05), ("fp32", 0)])
@pytest.mark.parametrize("width", [768, 1024, 1280, 1600])
def test_few_tiles_of_gpt2_are_padding(width: int, dtype: str, most: float) -> None:
    made = plan(Extents(dtype, width, 4 * width, width // 64, 2, 203, 1, 132, "sm_90"))
    for stage in STAGES[:-1]:
        tiles = made.extents.tiles(stage)
        assert tiles <= made.steps_of(stage) * made.warps <= (1 + most) * tiles


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_blocks_ask_later_where_layers_are_larger(dtype: str) -> None:
    def pauses(width: int) -> dict[str, int]:
        return plan(Extents(dtype, width, 4 * width, width // 64, 2, 203, 1, 132, "sm_90")).pauses()

    least, *_ = PAUSES.values()
    assert pauses(64) == pauses(256) == least  # figures measured with the smallest are not extended below
    models = [pauses(width) for width in (256, 768, 1024, 1280, 1600)]
    for smaller, larger in pairwise(models):
        assert all(0 < least[what] <= smaller[what] <= larger[what] for what in least)
    if dtype == "fp16":  # the measured models, within a tolerance
        for width, measured in zip((768, 1600), PAUSES.values(), strict=True):
            assert pauses(width) == pytest.approx(measured, abs=10)


def test_layernorm_behind_a_product_is_layernorm_before_it() -> None:
    weights = load("random:n_layer=2,n_head=3,n_embd=48,n_positions=64,vocab_size=203", dtype="fp32")
    tensors = {name: torch.randn_like(tensor) for name, tensor in weights.tensors.items()}
    weights = replace(weights, tensors=tensors)
    lines = record(weights, plan(Extents("fp32", 48, 192, 3, 2, 203, 1, 5, "sm_90"))).norm_terms.double()
    assert lines.shape == (2, 3 * 48 + 192, 2)
    x = 3 * torch.randn(48, dtype=torch.float64) + 1
    mean, deviation = x.mean(), x.std(correction=0)
    first = 0
    for norm, name in (("h.1.ln_1", "h.1.attn.c_attn"), ("h.1.ln_2", "h.1.mlp.c_fc")):
        weight, bias, gamma, beta = (tensors[f"{n}.{p}"].double() for n in (name, norm) for p in ("weight", "bias"))
        slope, level = lines[1, first : first + len(bias)].unbind(1)
        first += len(bias)
        found = (weight @ (gamma * x) - mean * slope) / deviation + level
        expected = F.linear(F.layer_norm(x, x.shape, gamma, beta, 0.0), weight, bias)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_launch_is_given_everything_that_the_kernel_takes() -> None:
    """Constant arguments are collected once in the executor; the others are named here."""
    weights = load("random:n_layer=1,n_head=2,n_embd=64,n_positions=64,vocab_size=99")
    executor = object.__new__(PersistentExecutor)  # without a GPU
    extents = Extents("fp32", 64, 256, 2, 1, 99, rows=1, blocks=3, arch="sm_90")
    executor.config, executor._tapes = weights.config, record(weights, plan(extents))
    executor._matrices = dict.fromkeys(("wte", "wpe", "head"), weights.tensors["wte.weight"])
    slots = Slots(weights.config, 1, 64, device=torch.device("cpu"), dtype=torch.float32)
    given = {*executor._tensors(slots), *executor._numbers(slots)}
    with_every_launch = {"lanes", "words", "count", "tag", "logits", "patience", "stamps"}
    assert given | with_every_launch == {name for name, *_ in Arguments._fields_}
    assert not given & with_every_launch


@given(positions=st.integers(1, 9000), warps=st.integers(1, 16), whole=st.booleans())
def test_parts_cover_a_context(positions: int, warps: int, whole: bool) -> None:
    extents = Extents("fp16", 64, 256, 1, 1, 99, 1, 8, "sm_90", positions=positions, warps=warps, whole=whole)
    assert (extents.parts - 1) * extents.part_positions < positions <= extents.parts * extents.part_positions
    assert not whole or extents.parts == 1
    assert replace(extents, rows=8).part_positions == extents.part_positions  # independent of the number of sequences


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "compute_75"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_row_has_a_warp(arch: str, dtype: str) -> None:
    """Work on single rows, such as sums of top-p, is done by one warp per row."""
    for width, heads in ((32, 2), (144, 3), (768, 12), (1600, 25)):
        extents = Extents(dtype, width, 4 * width, heads, 2, 777, 1, 40, arch)
        assert extents.most_rows <= best_warps(extents)
