"""Tunables with which a row has the same bits in any number of rows. tests/gpu checks the bits themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpline.kernels.catalog import CATALOG, find
from warpline.kernels.spec import KernelSpec, Variant

INVARIANT = [spec for spec in CATALOG.values() if spec.invariant is not None]
#: What determines the order of a row's sums; the rest only distributes the work.
ORDER = {
    "standard_matmul_bias": ("chains", "segments"),
    "standard_matmul_bias_gelu": ("chains", "segments"),
    "group_matmul_bias_residual": ("chains", "segments"),
    **dict.fromkeys(("append_attention", "append_attention_int8", "decode_attention"), ("warps", "unroll", "part")),
    **dict.fromkeys(("prompt_attention", "prompt_attention_int8"), ("tile_queries", "tile_keys", "warps", "teams")),
    **dict.fromkeys(("matmul", "matmul_bias", "matmul_bias_gelu", "matmul_bias_residual"), ("warps_k", "splits")),
}


def targets(spec: KernelSpec) -> list[tuple[str, str]]:
    archs = ("sm_75", "sm_80", "sm_90", "sm_120")
    return [(dtype, arch) for dtype in spec.dtypes for arch in archs if spec.runs_on(dtype, arch)]


def test_every_op_says_what_decides_its_sums() -> None:
    assert {spec.name for spec in INVARIANT} == set(ORDER)


@pytest.mark.parametrize("spec", INVARIANT, ids=lambda spec: spec.name)
def test_they_are_the_same_for_any_rows(spec: KernelSpec) -> None:
    rows = "batch" if "batch" in spec.bench_dims[0] else "rows"
    for dtype, arch in targets(spec):
        for dims in spec.bench_dims:
            found = set()
            for count in (1, 2, 8, 9, 16, 17, 64, 65, 128, 129, 256, 257, 1024, 16384):
                others = {**dims, rows: count}
                tunables = spec.tunables_for(others, dtype, arch, invariant=True)
                Variant.of(spec, dtype, others, arch, tunables)  # it can be built
                found.add(tuple(tunables[name] for name in ORDER[spec.name]))
            assert len(found) == 1, (dims, dtype, arch, found)


@given(st.integers(1, 4096))
def test_a_part_of_a_context_has_a_size_of_its_own(positions: int) -> None:
    """For any context length of a step its parts are sufficient."""
    dims = {"batch": 3, "heads": 2, "positions": positions, "depth": 64}
    tunables = find("decode_attention").tunables_for(dims, "fp16", "sm_90", invariant=True)
    assert tunables["part"] * tunables["splits"] >= positions
