"""`warpline bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL
from warpline.bench.run import Bench
from warpline.bench.workloads import Case
from warpline.cli.main import main


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out, printed.err


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["-m", SMALL, "--method", "naive,torch", "--new", "8", "--repetitions", "3", "--device", "cpu"]
    files = ["--csv", str(tmp_path / "a.csv"), "--md", str(tmp_path / "a.md"), "--html", str(tmp_path / "a.html")]
    code, out, _ = command(capsys, *options, *files, "--save", str(tmp_path))
    assert code == 0
    assert "so at best" in out
    last = json.loads(out.splitlines()[-1])
    assert last["rows"] == 2
    assert last["best"][0]["method"] in ("naive", "torch")
    (saved,) = tmp_path.rglob("bench.jsonl")
    code, out, _ = command(capsys, "compare", str(saved), str(saved))
    assert code == 0
    assert "same" in out
    code, out, _ = command(capsys, *options, "--json")
    assert len(json.loads(out)["rows"]) == 2


def test_interrupt_keeps_what_is_finished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = Bench._case

    def one(self: Bench, case: Case, *rest: Any) -> Any:
        if case.new == 6:
            raise KeyboardInterrupt
        return measured(self, case, *rest)

    monkeypatch.setattr(Bench, "_case", one)
    options = ["-m", SMALL, "--method", "naive", "--repetitions", "3", "--device", "cpu", "--save", str(tmp_path)]
    code, out, err = command(capsys, *options, "--new", "5,6,7")
    assert code == 130
    assert "stopped" in err
    assert json.loads(out.splitlines()[-1])["rows"] == 1
    (saved,) = tmp_path.rglob("bench.jsonl")
    assert [json.loads(line)["new"] for line in saved.read_text().splitlines()] == [5]
    assert command(capsys, *options, "--new", "6")[0] == 130


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["refrence"], "did you mean 'reference'"),
        (["--method", "torhc"], "did you mean 'torch'"),
        (["--dtype", "fp61"], "did you mean 'fp16'"),
        (["--batch", "two"], "--batch takes whole numbers"),
        (["-m", "random:nothing", "--device", "cpu"], "unknown model"),
        (["--prompt", "5000", "--device", "cpu", "--method", "torch"], "nothing could be measured"),
        (["--md", "/none/a.md"], "there is no folder"),
        (["--csv", "/tmp"], "it is a folder"),
        (["--save", "/dev/null/x"], "cannot write into /dev/null/x"),
        (["--charts", "/dev/null/x"], "cannot write into /dev/null/x"),
        (["--new-tokens", "few"], "--new-tokens takes whole numbers"),
        (["compare", "a", "b", "--html", "c.html"], "it writes no files"),
        (["-m", "random:gpt2-xl,n_embd=400000", "--device", "cpu", "--method", "torch"], "more than are free"),
        (["compare", "a"], "two results are compared"),
        (["compare", "/none/a", "/none/b"], "cannot read"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = command(capsys, *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
