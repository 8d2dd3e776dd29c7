"""Which candidates a sweep tries, and which it does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from warpline.hardware import ARCH_LIMITS
from warpline.kernels.catalog import CATALOG, find
from warpline.kernels.compile import Report
from warpline.kernels.spec import KernelSpec
from warpline.tune.candidates import (
    PER_ROUND,
    WHOLE_GRID,
    Case,
    blocks_held,
    cases,
    first_round,
    hopeless,
    impossible,
    near,
)

FINE = Report(registers=32, shared_bytes=0, stack_bytes=0, spill_bytes=0, seconds=0.1)


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_the_first_round_begins_with_the_default(spec: KernelSpec) -> None:
    for case in cases([spec], ["fp16", "fp32"], "sm_90"):
        plan = first_round(case)
        assert plan[0] == case.default
        assert len(set(plan)) == len(plan) <= max(WHOLE_GRID, 30)
        assert all(case.allows(values) for values in plan)
        assert impossible(case, case.default) is None


@pytest.mark.parametrize("count", [WHOLE_GRID - 1, WHOLE_GRID, WHOLE_GRID + 1])
def test_a_small_grid_is_tried_whole(count: int) -> None:
    """The default and others, up to `WHOLE_GRID` in all; of a larger grid, what is near the default."""
    allowed = [*itertools.product(range(32, 256, 32), range(1, 7))][:count]
    spec = replace(
        find("bias_gelu"),
        tunables={"block": tuple(range(32, 256, 32)), "unroll": tuple(range(1, 7))},
        default=lambda *_: {"block": 32, "unroll": 1},
        allows=lambda _dims, tunables, _dtype: tuple(tunables.values()) in allowed,
    )
    plan = first_round(Case(spec, "fp16", spec.bench_dims[0], "sm_90"))
    assert (len(plan) == count) == (count <= WHOLE_GRID)


def test_the_engines_shapes_are_swept() -> None:
    """A batch of 16, 64 and 128 sequences of gpt2: every product that our kernel computes."""
    found = {case.shape for case in cases([find("matmul_bias")], ["fp16"], "sm_90")}
    for rows in (16, 64, 128):
        for outputs, inputs in ((2304, 768), (768, 768), (768, 3072)):
            assert f"inputs={inputs} outputs={outputs} rows<={rows}" in found


def test_shapes_of_one_class_are_one_case() -> None:
    for arch, ways in (("sm_80", 1), ("sm_90", 2)):  # launches overlap from sm_90 on
        found = cases([find("flash_attention")], ["fp16"], arch)
        assert len(found) == ways * (len(find("flash_attention").bench_dims) - 1)  # one is the same with a window
    assert cases([find("layernorm")], ["bf16"], "sm_75") == []


def test_neighbours_differ_in_one_or_two_and_are_the_same_every_time() -> None:
    case = cases([find("matmul_bias")], ["fp16"], "sm_90")[0]
    centre = case.default
    found = near(case, centre, {centre}, PER_ROUND)
    apart = [sum(a != b for a, b in zip(values, centre, strict=True)) for values in found]
    assert apart == sorted(apart)
    assert set(apart) <= {1, 2}
    assert found == near(case, centre, {centre}, PER_ROUND)
    assert not {*found} & {*near(case, centre, {centre, *found}, PER_ROUND)}


def test_what_a_gpu_cannot_run_is_named(case: Case) -> None:
    assert impossible(case, case.default) is None
    turing = Case(find("matmul"), "fp16", {"rows": 64, "outputs": 768, "inputs": 3072}, "sm_75")
    assert "shared memory" in (impossible(turing, (128, 256, 64, 2, 4, 1, 1, 3)) or "")
    assert "clusters" in (impossible(turing, (64, 64, 32, 2, 2, 1, 4, 2)) or "")


def test_the_compilers_report_prunes(case: Case) -> None:
    values = (1024, 1)
    assert hopeless(case, values, FINE) is None
    spilled = Report(registers=64, shared_bytes=0, stack_bytes=8, spill_bytes=16, seconds=0.1)
    assert hopeless(case, values, spilled) == "spilled registers"
    greedy = Report(registers=128, shared_bytes=0, stack_bytes=0, spill_bytes=0, seconds=0.1)
    assert ARCH_LIMITS["sm_90"].registers < 128 * 1024
    assert blocks_held(case, values, greedy) == 0
    assert "no room" in (hopeless(case, values, greedy) or "")


def test_a_block_has_a_thousand_threads_at_most() -> None:
    case = Case(find("matmul_bias"), "fp16", {"rows": 1024, "outputs": 2304, "inputs": 768}, "sm_90")
    names = list(find("matmul_bias").tunables)
    found = set()
    for warps_m, warps_n, warps_k in ((2, 4, 1), (4, 8, 1), (8, 8, 1)):
        values = dict(zip(names, case.default, strict=True)) | {
            "warps_m": warps_m, "warps_n": warps_n, "warps_k": warps_k, "tile_m": 128, "tile_n": 128, "stages": 2,
        }  # fmt: skip
        threads = 32 * warps_m * warps_n * warps_k
        if case.allows(tuple(values.values())):
            why = impossible(case, tuple(values.values()))
            assert (why == "more than 1,024 threads") == (threads > 1024), (threads, why)
            found.add(threads > 1024)
    assert found
