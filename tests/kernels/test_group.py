"""Products by warpgroups: the layout of weights, the tiles, and the arguments of a launch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpline.engine.executors.graph.bind import blocks_at_once
from warpline.hardware import ARCH_LIMITS
from warpline.kernels import launch, tensor_map
from warpline.kernels.catalog import CATALOG
from warpline.kernels.catalog.group import from_tiles, in_tiles
from warpline.kernels.spec import KernelSpec, Variant

GROUP = [spec for spec in CATALOG.values() if spec.function == "group_matmul"]


@given(st.integers(1, 9).map(lambda n: 16 * n), st.integers(1, 5).map(lambda n: 64 * n))
def test_tiles_hold_every_weight_where_the_hardware_looks(outputs: int, inputs: int) -> None:
    weight = torch.randperm(outputs * inputs).view(outputs, inputs)
    tiles = in_tiles(weight)
    assert tiles.is_contiguous()
    assert torch.equal(from_tiles(tiles), weight)
    row, column = outputs - 3, inputs - 5
    chunk, within = column % 64 // 8, column % 8
    place = (chunk ^ row % 8) * 8 + within  # as group_place of warpgroup.cuh has it
    assert tiles[column // 64, row, place] == weight[row, column]


@pytest.mark.parametrize("spec", GROUP, ids=lambda spec: spec.name)
@pytest.mark.parametrize("width", [64, 768, 1024, 1600])
def test_every_shape_has_tiles_that_fit(spec: KernelSpec, width: int) -> None:
    for rows in (1, 9, 64, 65, 128, 256, 700, 1024, 5000):
        more = [] if "standard" in spec.name else [(width, 4 * width)]
        for outputs, inputs in [(3 * width, width), (16, width), *more]:
            dims = {"rows": rows, "outputs": outputs, "inputs": inputs}
            chosen = spec.default(dims, "fp16", "sm_90")
            assert spec.allows(dims, chosen, "fp16"), (dims, chosen)
            assert all(chosen[name] in choices for name, choices in spec.tunables.items())


@pytest.mark.parametrize("spec", GROUP, ids=lambda spec: spec.name)
def test_one_stage_is_too_few_for_two_tiles(spec: KernelSpec) -> None:
    """A stage is released when the next one is read: with one stage every warp would wait forever."""
    one = {"tile_m": 64, "tile_n": 32, "splits": 1, "stages": 1, "chains": 2, "segments": 1}
    assert spec.allows({"rows": 64, "outputs": 64, "inputs": 64}, one, "fp16")
    assert not spec.allows({"rows": 64, "outputs": 64, "inputs": 128}, one, "fp16")
    assert spec.allows({"rows": 64, "outputs": 64, "inputs": 128}, one | {"stages": 2}, "fp16")


def test_gpt2s_products_of_a_thousand_rows_run_at_once() -> None:
    shapes = ((2304, 768), (3072, 768), (768, 768), (768, 3072))
    for spec, (outputs, inputs) in zip([*GROUP, GROUP[-1]], shapes, strict=True):
        for rows in range(9, 1025):
            dims = {"rows": rows, "outputs": outputs, "inputs": inputs}
            shape = spec.launch(dims, spec.default(dims, "fp16", "sm_90"), "fp16")
            assert shape.grid <= blocks_at_once(shape.cluster, 132)  # on an H200
            assert shape.shared_bytes <= ARCH_LIMITS["sm_90"].block_shared_bytes


def test_a_matrix_in_tiles_is_packed_as_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, dims = GROUP[0], {"rows": 70, "outputs": 96, "inputs": 128}
    described = []

    def words(matrix: torch.Tensor, rows: int) -> list[int]:
        described.append((tuple(matrix.shape), rows))
        return list(range(100, 100 + tensor_map.WORDS))

    monkeypatch.setattr(tensor_map, "words", words)
    variant = Variant.of(spec, "fp16", dims, "sm_90")
    assert "const __grid_constant__ warpline::TensorMap x" in variant.translation_unit()
    inputs = [torch.zeros(buffer.shape(dims)) for buffer in spec.inputs]
    packing = launch.Packing(variant, {**dims, **spec.number_values(dims)})
    packed = packing.pack([*inputs, torch.zeros(70, 96)])
    assert described == [((70, 128), dict(variant.tunables)["tile_m"])]
    x, statistics = (int(at or 0) for at in packed.pointers[:2])
    assert list((ctypes.c_uint64 * tensor_map.WORDS).from_address(x)) == list(range(100, 100 + tensor_map.WORDS))
    assert ctypes.c_uint64.from_address(statistics).value == inputs[1].data_ptr()
