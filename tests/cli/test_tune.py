"""`warpline tune` on a machine without a GPU: lists, projections, recorded sweeps, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Run
from tests.tune import standin
from tests.tune.conftest import GPU
from warpline.cli.doctor import _count
from warpline.errors import KernelError
from warpline.kernels import choices
from warpline.kernels.catalog import find
from warpline.kernels.choices import Summary
from warpline.tune import candidates, worker


def recorded(**changes: Any) -> dict[str, Any]:
    row = {
        "gpu": "NVIDIA Imaginary 1",
        "kernel": "layernorm",
        "dtype": "fp16",
        "dims": {"rows": 1, "columns": 768},
        "shape": "columns=768 rows<=1",
        "digest": "d",
        "basis": "measured",
        "default": {"block": 128, "row_warps": 1},
        "default_us": 2.0,
        "best": {"block": 256, "row_warps": 1},
        "best_us": 1.5,
        "verdict": "improved",
        "why": None,
        "tried": 9,
        "failed": [[512, 1, "no answer within 20 s"]],
        "pruned": {},
        "left_out": 0,
    }
    return row | changes


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    rows = [
        recorded(),
        recorded(kernel="softmax", verdict="confirmed", best={"block": 128, "row_warps": 1}, best_us=2.0),
    ]
    (tmp_path / "tune.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def grid() -> int:
    return math.prod(len(choices) for choices in find("sample").tunables.values())


def test_candidates_are_compiled_and_listed(run: Run) -> None:
    code, out, err = run("tune", "sample", "--dtype", "fp16")
    assert (code, err) == (0, "")
    assert "6 cases compiled for sm_90" in out
    assert out.splitlines()[-1].endswith(
        "timing them needs a CUDA GPU: run this where there is one, or see --gpu and --from"
    )
    listed = json.loads(run("tune", "sample", "--dtype", "fp16", "--json")[1])
    assert [len(case["candidates"]) + sum(case["pruned"].values()) for case in listed["cases"]] == 6 * [
        grid()
    ]  # alone and overlapping


def test_what_there_is_no_time_for_is_said(run: Run) -> None:
    listed = json.loads(run("tune", "sample", "--minutes", "0", "--json")[1])
    assert {case["left_out"] for case in listed["cases"]} == {grid()}


def test_a_recorded_sweep_is_shown(run: Run, sweep: Path) -> None:
    code, out, err = run("tune", "--from", str(sweep))
    assert (code, err) == (0, "")
    assert "block 128→256" in out
    assert "25 %" in out
    assert "failed: layernorm fp16 block=512 row_warps=1: no answer within 20 s" in out
    assert "2 cases: 1 improved" in out
    rows = json.loads(run("tune", "layernorm", "--from", str(sweep / "tune.jsonl"), "--json")[1])["rows"]
    assert rows == [recorded()]


def test_a_heat_map_is_written(run: Run, sweep: Path) -> None:
    assert run("tune", "--from", str(sweep), "--picture", str(sweep / "gains.png"))[0] == 0
    assert (sweep / "gains.png").read_bytes().startswith(b"\x89PNG")


def test_projection_is_saved_and_marked(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("tune", "matmul_bias_residual", "--gpu", "t4", "--dtype", "fp16", "--save", str(tmp_path))
    assert code == 0
    assert "projected from the compiler's report and the roofline, not measured" in out
    rows = [json.loads(line) for line in (tmp_path / "tesla-t4" / "tune.jsonl").read_text().splitlines()]
    assert {(row["gpu"], row["basis"]) for row in rows} == {("Tesla T4", "projected")}
    assert not choices.user_file("Tesla T4").exists()


@pytest.fixture
def imaginary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that torch reports, a worker that needs none, and one case."""
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path))
    for name, answer in {"is_available": True, "current_device": 0, "get_device_name": GPU}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(candidates, "cases", lambda *asked, all_of=candidates.cases: all_of(*asked)[:1])
    monkeypatch.setattr(worker, "serve_gpu", standin.serve)
    monkeypatch.setattr(worker, "CHECKING", 2.0)


@pytest.mark.usefixtures("imaginary")
def test_a_sweep_reports_saves_and_stores(run: Run, tmp_path: Path) -> None:
    code, out, err = run("tune", "layernorm", "--dtype", "fp16", "--save", str(tmp_path / "results"))
    assert code == 0
    assert err == f"1 choices kept in {choices.user_file(GPU)}\n"
    assert "block 128→1024, row_warps 1→4" in out
    assert "row_warps=1: no answer within 2 s" in out
    assert "1 cases: 1 improved" in out
    assert "4 candidates failed and were skipped" in out
    shown = run("tune", "--from", str(tmp_path / "results" / "nvidia-imaginary-1"))[1]
    assert shown.splitlines() == out.splitlines()
    assert choices.summary(GPU).swept == 1


@pytest.mark.usefixtures("imaginary")
def test_an_interrupted_sweep_shows_what_there_is(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.Worker, "time", interrupt)
    code, out, err = run("tune", "layernorm", "--dtype", "fp16", "--save", str(tmp_path / "results"))
    assert code == 130
    assert "failed: layernorm" in out
    assert err.endswith("stopped\n")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layernrom"], "unknown kernel 'layernrom' (did you mean 'layernorm'?)"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--gpu", "voodoo2"], "unknown GPU 'voodoo2'; choose from: Tesla T4"),
        (["--gpu", "Tesla V100-SXM2"], "unknown GPU 'Tesla V100-SXM2'"),
        (["--from", "nowhere.jsonl"], "there is no sweep in nowhere.jsonl"),
        (["--picture", "no/such/folder.png"], "there is no folder no/such"),
        (["--minutes", "-1"], "Invalid value for '--minutes'"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("tune", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_record_without_these_kernels_is_refused(run: Run, sweep: Path) -> None:
    assert "has no rows of these kernels" in run("tune", "gelu", "--from", str(sweep))[2]


def test_doctor_counts_choices(run: Run) -> None:
    assert json.loads(run("doctor", "--json")[1])["choices"] == []  # no GPU, no choices
    text = _count(Summary("Tesla T4", 3, 10, 10, 2, "there.json"))
    assert text == (
        "Tesla T4: 3 choices of your own sweep, 10 shipped (10 projected), 2 stale: run 'warpline tune' (there.json)"
    )


@pytest.mark.parametrize("options", [(), ("--gpu", "t4")])
def test_without_the_compiler_nothing_is_tried(run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str]) -> None:
    def missing() -> str:
        raise KernelError("compiling kernels needs NVRTC: pip install 'warpline[cuda]'")

    monkeypatch.setattr("warpline.kernels.compile.nvrtc_version", missing)
    code, out, err = run("tune", *options)
    assert (code, out) == (2, "")
    assert err == "error: compiling kernels needs NVRTC: pip install 'warpline[cuda]'\n"
