"""A small sweep on the GPU: it finds something, continues after an interruption, and a launch uses what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from warpline.bench.timing import time_in_turn
from warpline.cli.main import main
from warpline.kernels import choices, launch
from warpline.kernels.arguments import Dims
from warpline.kernels.catalog import find
from warpline.kernels.choices import Choice
from warpline.kernels.spec import KernelSpec
from warpline.kernels.verify import Trial, random_inputs
from warpline.tune.candidates import Case
from warpline.tune.journal import Journal
from warpline.tune.sweep import Result, Sweep
from warpline.tune.worker import Fault, Named, Worker


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "cache"))
    launch.forget()


def gpu() -> str:
    return torch.cuda.get_device_name()


def case(name: str, dims: Dims) -> Case:
    return Case(find(name), "fp16", dims, launch.arch_of(0))


LAYERNORM, MATMUL = {"rows": 1024, "columns": 768}, {"rows": 64, "outputs": 768, "inputs": 768}


def sweep(*wanted: Case, minutes: float = 2.0) -> list[Result]:
    return Sweep(wanted, Worker(), Journal(gpu()), minutes).run()


@pytest.mark.alone
def test_a_sweep_finds_goes_on_and_is_picked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = case("layernorm", LAYERNORM), case("matmul_bias", MATMUL)
    results = sweep(*cases)
    for result in results:
        assert result.why is None
        assert result.faults == {}
        assert result.best is not None
        assert result.timed > 5
        assert result.best.ratio <= 1
    known = {(one.case.spec.name, values) for one in results for values in one.attempts}
    check = Worker.check

    def never_twice(self: Worker, named: Named, tunables: dict[str, int]) -> None:
        assert (named[0], tuple(tunables.values())) not in known, "measured again"
        check(self, named, tunables)

    monkeypatch.setattr(Worker, "check", never_twice)
    again = sweep(*cases)  # may search further around the best
    assert all({*before.attempts} <= {*after.attempts} for before, after in zip(results, again, strict=True))


def used(spec: KernelSpec, dims: Dims, **options: str) -> dict[str, int]:
    call = launch.Call(spec, random_inputs(spec, "fp16", dims, 1), **options)  # type: ignore[arg-type]
    return dict(call.program[0].tunables)


def test_a_launch_takes_what_is_stored() -> None:
    spec = find("layernorm")
    made = case("layernorm", LAYERNORM)
    other = {"block": 512, "row_warps": 4}
    default = made.tunables(made.default)
    assert default != other
    kernel, dtype, shape, digest = made.key
    choices.remember(gpu(), [Choice(kernel, dtype, shape, digest, other)])
    launch.forget()
    assert used(spec, LAYERNORM) == used(spec, {"rows": 600, "columns": 768}) == other
    assert used(spec, {"rows": 1024, "columns": 800})["block"] == default["block"]
    assert used(spec, LAYERNORM, arch="compute_75") == default  # code of another GPU


def test_wrong_candidates_and_impossible_ones_are_faults() -> None:
    worker, named = Worker(), ("layernorm", "fp16", LAYERNORM, False)
    try:
        worker.open(named)
        with pytest.raises(Fault, match="tunables are block, row_warps"):
            worker.check(named, {"block": 128})
        worker.check(named, {"block": 128, "row_warps": 1})  # continues
        ((median, p20, p80),) = worker.time(named, [{"block": 128, "row_warps": 1}])
        assert 0.5 < p20 <= median <= p80 < 50
    finally:
        worker.stop()


def test_a_hanging_queue_is_survived() -> None:
    """A time limit that nothing can meet stands for a kernel that never ends."""
    hasty, named = Worker(patience=0.001), ("layernorm", "fp16", LAYERNORM, False)
    with pytest.raises(Fault, match="no answer within"):
        hasty.open(named)
    hasty._patience = 1.0
    hasty.check(named, {"block": 128, "row_warps": 1})
    hasty.stop()


@pytest.mark.alone
def test_ways_in_turn_are_told_apart() -> None:
    large, small = (torch.empty(n, device="cuda") for n in (1 << 26, 1 << 20))
    slow, fast = time_in_turn([lambda _: large.add_(1), lambda _: small.add_(1)], 2)
    assert slow.median > 5 * fast.median


@pytest.mark.alone
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["tune", "layernorm", "append_attention", "--dtype", "fp16", "--minutes", "1", "--save", str(tmp_path)]
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 0
    assert "choices kept in" in capsys.readouterr().err
    (path,) = tmp_path.glob("*/tune.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["verdict"] for row in rows} <= {"improved", "confirmed"}
    assert {row["gpu"] for row in rows} == {gpu()}
    assert [row["overlapping"] for row in rows].count(True) == len(rows) / 2  # every case launched in both ways
    assert choices.summary(gpu()).swept == len(rows) / 2


def test_projected_choices_compute_what_they_should() -> None:
    """Those for the T4, on the Turing path: they have not been timed, but they are correct."""
    for choice in choices.read(choices.shipped_file("Tesla T4"), "Tesla T4"):
        spec = find(choice.kernel)
        dims = next(dims for dims in spec.bench_dims if choices.shape_class(spec, dims) == choice.shape)
        Trial(spec, choice.dtype, dims, 7).check(arch="compute_75", tunables=choice.tunables)


def test_kernels_whose_inputs_are_unlike_the_others_can_be_swept() -> None:
    specs = [find(n) for n in ("sample", "append_token", "append_attention", "head_argmax", "newest_embedding")]
    for result in sweep(*(Case(spec, spec.dtypes[0], spec.bench_dims[0], launch.arch_of(0)) for spec in specs)):
        assert result.why is None, result.case.label
        assert result.default is not None
        assert result.default.us is not None
