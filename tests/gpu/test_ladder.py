"""Every rung of every ladder on the GPU: odd shapes compared with float64, and complete rows."""

from __future__ import annotations

import pytest
import torch

from warpline.bench.ladder import climb, steps
from warpline.bench.ladder_report import columns, markdown, page, svg
from warpline.kernels import launch
from warpline.kernels.arguments import Dims
from warpline.kernels.compile import compile_many
from warpline.kernels.ladder import LADDERS
from warpline.kernels.ladder.rung import Ladder, Rung
from warpline.kernels.verify import Trial, random_inputs

CASES = [
    pytest.param(rung, dims, id=f"{ladder.name}-{rung.name.replace(' ', '_')}-{'x'.join(map(str, dims.values()))}")
    for ladder in LADDERS.values()
    for rung in ladder.rungs
    for dims in ladder.odd_dims
]
RUNGS = [
    pytest.param(ladder, rung, id=f"{ladder.name}-{rung.name.replace(' ', '_')}")
    for ladder in LADDERS.values()
    for rung in ladder.rungs
]
#: Small enough to climb in seconds, large enough to give work to more than one block.
SMALL = {
    "matmul": "130x260x96",
    "layernorm": "300x768",
    "softmax": "300x1024",
    "gelu": "300x1028",
    "attention": "1x3x300x64",
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile all of them at once, on all cores."""
    arch = launch.arch_of(0)
    pairs = [(rung, dims) for ladder in LADDERS.values() for rung in ladder.rungs for dims in ladder.odd_dims]
    compile_many(list({(rung.compiled_as(dims, arch), arch): None for rung, dims in pairs}))


@pytest.mark.parametrize(("rung", "dims"), CASES)
def test_rung_against_float64(rung: Rung, dims: Dims) -> None:
    Trial(rung.spec, rung.dtype, rung.dims(dims), torch.seed() % 2**31).check()


@pytest.mark.parametrize(("ladder", "rung"), RUNGS)
def test_rung_at_the_ladders_shape(ladder: Ladder, rung: Rung) -> None:
    Trial(rung.spec, rung.dtype, rung.dims(ladder.dims), torch.seed() % 2**31).check()


@pytest.mark.parametrize(("ladder", "rung"), RUNGS)
def test_turing_path(ladder: Ladder, rung: Rung) -> None:
    """Compiled as PTX for compute_75 and run here."""
    for dims in ladder.odd_dims[::4]:
        Trial(rung.spec, rung.dtype, rung.dims(dims), torch.seed() % 2**31).check(arch="compute_75")


def test_two_calls_with_constants_of_their_own_take_turns() -> None:
    rung = next(rung for rung in LADDERS["gelu"].rungs if rung.name == "constant bias")
    dims = {"rows": 5, "columns": 96}
    inputs = [random_inputs(rung.spec, "fp32", dims, seed) for seed in (1, 2)]
    calls = [launch.Call(rung.spec, tensors) for tensors in inputs]
    for _ in range(2):
        for call, (x, bias) in zip(calls, inputs, strict=True):
            call.launch()
            torch.testing.assert_close(call.outputs[0], torch.nn.functional.gelu(x + bias, approximate="tanh"))


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_rows_are_whole(ladder: Ladder) -> None:
    rows = list(climb([(ladder, ladder.sized(SMALL[ladder.name]))]))
    assert len(rows) == steps(ladder) == len(columns(rows)) - 1
    assert [row["rung"] for row in rows[: len(ladder.rungs)]] == [rung.name for rung in ladder.rungs]
    for row in rows:
        assert row["status"] == "ok"
        assert row["gpu"] == torch.cuda.get_device_name()
        assert row["us_p20"] <= row["us"] <= row["us_p80"]
        assert 0 <= row["percent_of_roof"] < 120  # small shapes are far from it
        assert (row["gain"] is None) == (row["kind"] == "yardstick" or row["rung"] == ladder.rungs[0].name)
    assert markdown(rows)
    assert svg(rows)
    assert page([rows])


def test_a_rung_without_room_is_named() -> None:
    matmul = LADDERS["matmul"]
    rows = list(climb([(matmul, matmul.sized("3x16400x8"))]))
    assert [row["rung"] for row in rows if row["status"] != "ok"] == ["constant bias"]
    assert any("does not exist at this shape" in line for line in columns(rows)[5])
