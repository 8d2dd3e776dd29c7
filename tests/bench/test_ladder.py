"""Climbs measured with a fake GPU: what is checked, timed, compared and left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from warpline.bench import ladder as bench
from warpline.bench.timing import Timing
from warpline.errors import DeviceError, KernelError
from warpline.kernels import launch
from warpline.kernels.ladder import LADDERS
from warpline.kernels.ladder.rung import Rung
from warpline.kernels.spec import KernelSpec
from warpline.kernels.verify import random_inputs


class Played:
    """Records which specs were checked, and the inputs of each call."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.calls: dict[str, list[list[Tensor]]] = {}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    log = Played()

    class Call:
        def __init__(self, spec: KernelSpec, inputs: list[Tensor], *, numbers: dict[str, Any]):
            log.calls.setdefault(spec.name, []).append(inputs)
            assert set(numbers) == {number.name for number in spec.numbers}

        def launch(self) -> None:
            pass

    class Trial:
        def __init__(self, spec: KernelSpec, *_: object):
            self.spec = spec

        def check(self) -> None:
            log.checked.append(self.spec.name)

    def inputs(spec: KernelSpec, dtype: str, dims: dict[str, int], seed: int, *, full: bool) -> list[Tensor]:
        assert full
        return random_inputs(spec, dtype, dims, seed, "cpu")

    times = iter(range(100, 0, -1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(launch, "Call", Call)
    monkeypatch.setattr(bench, "Trial", Trial)
    monkeypatch.setattr(bench, "random_inputs", inputs)
    monkeypatch.setattr(bench, "compile_many", lambda jobs: jobs)
    monkeypatch.setattr(bench, "provenance", lambda: {"gpu": "played"})
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1000.0)
    monkeypatch.setattr(bench, "product_rate", lambda _: 10.0)
    monkeypatch.setattr(bench, "rotating_sets", lambda _: 3)
    monkeypatch.setattr(bench, "_timed", lambda *_: Timing(*[float(next(times))] * 3))
    return log


def test_rows(played: Played) -> None:
    matmul = LADDERS["matmul"]
    rows = list(bench.climb([(matmul, matmul.sized("6x5x4"))]))
    assert len(rows) == bench.steps(matmul) == 12
    by_name = {(row["rung"], row["dtype"]): row for row in rows}
    assert by_name["naive", "fp32"]["gain"] is None
    assert by_name["coalesced", "fp32"]["gain"] == pytest.approx(100 / 99, abs=1e-4)
    assert by_name["float4", "fp32"]["gain"] == pytest.approx(97 / 95, abs=1e-4)  # over unrolled, not the aside
    assert [row["dtype"] for row in rows if row["kind"] == "yardstick"] == ["fp32", "fp16"]
    naive = by_name["naive", "fp32"]
    assert naive["tflop_s"] == pytest.approx(2 * 6 * 5 * 4 / 100e-6 / 1e12, abs=1e-3)
    assert {row["shape"] for row in rows} == {"6x5x4"}


def test_every_rung_is_checked_at_every_odd_shape_and_its_own(played: Played) -> None:
    gelu = LADDERS["gelu"]
    list(bench.climb([(gelu, gelu.sized("2x3072"))]))
    for rung in gelu.rungs:
        assert played.checked.count(rung.spec.name) == len(gelu.odd_dims) + 1


def test_a_constant_is_the_same_in_every_set(played: Played) -> None:
    gelu = LADDERS["gelu"]
    list(bench.climb([(gelu, {"rows": 2, "columns": 8})]))
    for name, alike in (("gelu_constant", True), ("gelu_float4", False)):
        (x, bias), (other_x, other_bias), _ = played.calls[name]
        assert x is not other_x
        assert (bias is other_bias) == alike


def test_gains_are_over_the_next_rung_that_is_there(played: Played) -> None:
    attention = LADDERS["attention"]
    rows = list(bench.climb([(attention, attention.sized("1x1x3x128"))]))
    status = {row["rung"]: row["status"] for row in rows}
    assert [name for name, text in status.items() if text != "ok"] == ["online alone", "shared tiles", "online"]
    assert next(row for row in rows if row["rung"] == "register tiles")["gain"] == pytest.approx(99 / 98, abs=1e-4)


def test_a_wrong_rung_has_no_time(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rung: Rung, *_: object) -> None:
        if rung.name == "warp":
            raise KernelError("wrong")

    monkeypatch.setattr(bench, "check", wrong)
    rows = bench.climb([(LADDERS["softmax"], {"rows": 2, "columns": 8})])
    assert [next(rows)["rung"] for _ in range(2)] == ["naive", "tree"]
    with pytest.raises(KernelError, match="wrong"):
        next(rows)


def test_too_large_a_shape_is_one_line(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(bench, "check", full)
    with pytest.raises(DeviceError, match="choose a smaller --shape"):
        list(bench.climb([(LADDERS["softmax"], {"rows": 2, "columns": 8})]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DeviceError, match="needs a CUDA GPU"):
        list(bench.climb([]))
