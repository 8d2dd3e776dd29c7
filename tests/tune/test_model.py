"""Projections: what the model must predict correctly, and that it predicts nothing else."""

from __future__ import annotations

import pytest

from warpline.errors import ConfigError
from warpline.hardware import known_gpu
from warpline.kernels.catalog import find
from warpline.kernels.choices import PROJECTED
from warpline.kernels.compile import Report
from warpline.tune import report
from warpline.tune.candidates import Case, cases
from warpline.tune.model import FINALISTS, LATENCY, is_told_apart, microseconds, project

T4 = known_gpu("t4")
FINE = Report(registers=64, shared_bytes=0, stack_bytes=0, spill_bytes=0, seconds=0.1)
#: tile_m, tile_n, tile_k, warps_m, warps_n, warps_k, splits, stages
LARGE, SMALL, TINY = (128, 128, 32, 2, 4, 1, 1, 2), (32, 64, 32, 2, 4, 1, 1, 2), (16, 16, 32, 1, 1, 1, 1, 2)


def product(rows: int, outputs: int = 2304, inputs: int = 768, dtype: str = "fp16") -> Case:
    return Case(find("matmul_bias"), dtype, {"rows": rows, "outputs": outputs, "inputs": inputs}, "sm_75")


def us(case: Case, values: tuple[int, ...]) -> float:
    assert T4 is not None
    return microseconds(case, values, FINE, T4)


def test_padding_and_idle_multiprocessors_cost() -> None:
    """Few rows in large tiles are mostly padding; many rows in tiny tiles are mostly traffic."""
    assert us(product(16, 768), SMALL) < us(product(16, 768), LARGE)
    assert us(product(16384), LARGE) < us(product(16384), SMALL) < us(product(16384), TINY)


def test_nothing_is_faster_than_memory_or_arithmetic() -> None:
    assert T4 is not None
    assert T4.spec_bandwidth is not None
    assert T4.tensor_tflops is not None
    for case in (product(16), product(1024), product(16384)):
        for values in (LARGE, SMALL, TINY):
            assert us(case, values) >= case.spec.bytes(case.dims, "fp16") / T4.spec_bandwidth / 1e3
            assert us(case, values) >= case.spec.flops(case.dims) / T4.tensor_tflops / 1e6


def test_more_rows_never_take_less() -> None:
    times = [us(product(rows), LARGE) for rows in (16, 128, 129, 1024, 16384)]
    assert times == sorted(times)


def test_projections_are_marked_and_checked_by_the_compiler() -> None:
    assert T4 is not None
    found = [product(64, 768), Case(find("layernorm"), "fp16", {"rows": 64, "columns": 768}, "sm_75")]
    tiles, row_op = project(found, T4)
    assert tiles.improved
    assert tiles.timed + len(tiles.pruned) == 1 + FINALISTS
    (choice,) = report.choices(report.rows([tiles], {"gpu": T4.name}))
    assert choice.tunables is not None
    assert choice.basis == PROJECTED
    assert not is_told_apart(row_op.case)
    assert not row_op.improved
    assert list(row_op.attempts) == [row_op.case.default]


def test_a_gpu_of_which_too_little_is_known_is_refused() -> None:
    v100 = known_gpu("Tesla V100-SXM2-32GB")
    assert v100 is not None
    with pytest.raises(ConfigError, match="cannot be projected"):
        project(cases([find("layernorm")], ["fp16"], "sm_80"), v100)


def test_a_kernel_with_too_little_under_way_takes_its_latency() -> None:
    """One block with one stage of tiles ahead requests a known number of bytes per latency; computed by hand."""
    assert T4 is not None
    assert T4.spec_bandwidth is not None
    assert T4.units is not None
    case = product(16, outputs=64, inputs=4096)
    ahead = (16 + 64) * 32 * 2  # bytes of a stage: rows of both tiles, 32 deep, in half precision
    moved = case.spec.bytes(case.dims, "fp16")
    taken = moved / ahead * LATENCY  # µs, by Little's law
    assert us(case, (16, 64, 32, 1, 4, 1, 1, 2)) == pytest.approx(taken, rel=0.01)
    assert taken > moved / T4.spec_bandwidth / 1e3
