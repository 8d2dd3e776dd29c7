"""The ladders: their rungs, and that all of them compile on a machine without a GPU."""

from __future__ import annotations

import pytest

from warpline.errors import ConfigError
from warpline.hardware import resident_blocks
from warpline.kernels.catalog import CATALOG
from warpline.kernels.compile import compile_many, compile_one
from warpline.kernels.ladder import LADDERS, find_ladder
from warpline.kernels.ladder.rung import CONSTANT_BYTES, Ladder, Rung
from warpline.kernels.spec import Variant

TOPS = {
    "matmul": "matmul_bias",
    "layernorm": "layernorm",
    "softmax": "softmax",
    "gelu": "bias_gelu",
    "attention": "flash_attention",
}
EVERY = pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)


def rung_of(ladder: str, name: str) -> Rung:
    return next(rung for rung in LADDERS[ladder].rungs if rung.name == name)


def unit_of(ladder: str, name: str) -> str:
    return rung_of(ladder, name).compiled_as(LADDERS[ladder].dims, "sm_80").translation_unit()


def test_the_top_is_the_production_kernel_itself() -> None:
    assert {name: ladder.climb[-1].spec for name, ladder in LADDERS.items()} == {
        name: CATALOG[spec] for name, spec in TOPS.items()
    }


@EVERY
def test_structure(ladder: Ladder) -> None:
    names = [rung.name for rung in ladder.rungs]
    assert len(set(names)) == len(names) >= 6
    assert not ladder.rungs[0].variant
    top = ladder.climb[-1].spec
    for rung in ladder.rungs:
        assert rung.why.endswith(".")
        assert rung.dtype in rung.spec.dtypes
        assert [(b.name, b.dims) for b in rung.spec.inputs] == [(b.name, b.dims) for b in top.inputs]
        assert [(b.name, b.dims) for b in rung.spec.outputs] == [(b.name, b.dims) for b in top.outputs]
        assert rung.spec.reference is top.reference
        assert all(rung.allows(dims, "sm_75") for dims in (ladder.dims, *ladder.odd_dims))


def test_every_lower_rung_has_a_name_of_its_own() -> None:
    lower = [r.spec for ladder in LADDERS.values() for r in ladder.rungs if r.spec not in CATALOG.values()]
    assert len({spec.name for spec in lower}) == len(lower)
    assert not {spec.name for spec in lower} & set(CATALOG)


def test_what_the_reference_systems_tried_is_there() -> None:
    wanted = {
        "matmul": ("restrict", "unrolled", "constant bias", "float4", "shared tiles", "register tiles"),
        "layernorm": ("tree", "warp", "block", "float4"),
        "softmax": ("tree", "warp", "block", "online"),
        "gelu": ("restrict", "unrolled", "float4", "constant bias", "fast tanh"),
        "attention": ("online alone", "shared tiles", "online", "tensor cores", "window"),
    }
    for ladder, names in wanted.items():
        assert set(names) <= {rung.name for rung in LADDERS[ladder].rungs}


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@EVERY
def test_every_rung_compiles_without_spills(ladder: Ladder, arch: str) -> None:
    for binary in compile_many([(rung.compiled_as(ladder.dims, arch), arch) for rung in ladder.rungs]):
        report, shape = binary.report, binary.program.smallest_launch
        assert report.spill_bytes == report.stack_bytes == 0, binary.program.label
        assert report.registers is not None
        assert report.shared_bytes is not None
        assert report.shared_bytes <= 48 << 10
        assert resident_blocks(arch, shape.block, report.registers, report.shared_bytes + shape.shared_bytes)


@EVERY
def test_odd_shapes_compile(ladder: Ladder) -> None:
    lower = [rung for rung in ladder.rungs if rung.spec not in CATALOG.values()]
    jobs = {(rung.compiled_as(dims, "sm_75"), "sm_75"): None for rung in lower for dims in ladder.odd_dims[::3]}
    assert [b.program.label for b in compile_many(list(jobs)) if b.report.spill_bytes] == []


@pytest.mark.parametrize("ladder", ["matmul", "gelu"])
def test_restrict_is_all_that_the_restrict_rung_changes(ladder: str) -> None:
    without, promised = unit_of(ladder, "coalesced"), unit_of(ladder, "restrict")
    assert "__restrict__" not in without
    bare = promised.replace("__restrict__ ", "").replace(f"{ladder}_restrict", f"{ladder}_coalesced")
    assert bare == without != promised


@pytest.mark.parametrize(("ladder", "below"), [("matmul", "unrolled"), ("gelu", "float4")])
def test_a_constant_is_no_parameter(ladder: str, below: str) -> None:
    unit = unit_of(ladder, "constant bias")
    extent = LADDERS[ladder].dims["outputs" if ladder == "matmul" else "columns"]
    assert f"__constant__ __align__(16) float bias[{extent}];" in unit
    assert "__restrict__ bias" not in unit
    called = [
        line.replace("constant", below) for line in (unit.splitlines()[-2], unit_of(ladder, below).splitlines()[-2])
    ]
    assert called[0] == called[1]
    variant = rung_of(ladder, "constant bias").compiled_as(LADDERS[ladder].dims, "compute_75")
    assert b"ld.const" in compile_one(variant, "compute_75").code


def test_constant_memory_has_an_end() -> None:
    rung, most = rung_of("gelu", "constant bias"), CONSTANT_BYTES // 4
    assert rung.allows({"rows": 3, "columns": most}, "sm_80")
    assert not rung.allows({"rows": 3, "columns": most + 4}, "sm_80")
    with pytest.raises(ConfigError, match="cannot be built"):
        Variant.of(rung.spec, "fp32", {"rows": 3, "columns": most + 4}, "sm_80")


def test_shapes() -> None:
    assert LADDERS["matmul"].sized("3x5X7") == {"rows": 3, "outputs": 5, "inputs": 7}
    attention = LADDERS["attention"].sized("2×3×40×64")
    assert attention == {"batch": 2, "heads": 3, "queries": 40, "keys": 40, "depth": 64}
    assert LADDERS["attention"].shape_of(attention) == "2x3x40x64"
    for bad in ("", "3x5", "3x5x7x9", "3x0x7", "axbxc", "-3x5x7", "3,5,7"):
        with pytest.raises(ConfigError, match="the shape of matmul is ROWSxOUTPUTSxINPUTS, such as 4096x2304x768"):
            LADDERS["matmul"].sized(bad)
    with pytest.raises(ConfigError, match="did you mean 'softmax'"):
        find_ladder("softmx")


@EVERY
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_launches_grow_with_the_work(ladder: Ladder, arch: str) -> None:
    """A grid is whole blocks, larger than none, and for sixteen times the rows about sixteen times as large."""
    rows = next(name for name in ("rows", "batch") if name in ladder.dims)
    for rung in ladder.rungs:
        dims = rung.dims(ladder.dims)
        one, many = (rung.compiled_as(its, arch).launch(its).grid for its in (dims, {**dims, rows: 16 * dims[rows]}))
        assert isinstance(one, int)
        assert 0 < one <= 2**31
        assert 8 * one <= many <= 32 * one, rung.name  # tiles may become smaller
