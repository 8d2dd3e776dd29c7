"""`warpline profile` on a machine without a GPU: record, keep, show, compare, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.conftest import SMALL
from tests.profile.conftest import made_up
from warpline.profile.session import read, save


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    save(made_up(gap=1.0), tmp_path / "a.json")
    save(made_up(), tmp_path / "b.json")
    return tmp_path


def test_record_and_write_everything(run: Run, tmp_path: Path) -> None:
    words = ["profile", "torch", "-m", SMALL, "--device", "cpu", "--context", "8", "--steps", "2", "--phase", "decode"]
    files = {name: str(tmp_path / f"p.{name}") for name in ("html", "md", "trace", "session")}
    extra = [word for name, path in files.items() for word in (f"--{name}", path)]
    code, out, err = run(*words, *extra, "--save", str(tmp_path / "results"))
    assert (code, err) == (0, "")
    assert "transformer blocks" in out
    assert all(Path(path).stat().st_size for path in files.values())
    (found,) = (tmp_path / "results").rglob("*.json")
    assert found.parts[-3:-1] == ("cpu", "profile")
    assert read(found).phases[0].steps == 2
    code, out, _ = run("profile", str(found), "--json")
    assert code == 0
    assert json.loads(out)["method"] == "torch"


def test_several_methods_in_one_process(run: Run, tmp_path: Path) -> None:
    """A method that fails prints a line, the others are recorded, and the command fails. The second run reports what it
    replaces."""
    words = ["profile", "torch,graph", "cpu:int8", "--dtype", "fp32", "-m", SMALL, "--device", "cpu", "--context", "8"]
    words += ["--steps", "2", "--phase", "decode", "--save", str(tmp_path)]
    code, out, err = run(*words)
    assert code == 2
    assert err.splitlines() == [
        "graph:fp32: graph cannot be profiled here: runs on cuda only",
        "error: 1 of 3 methods were not profiled: graph:fp32",
    ]
    kept = {path.name.split("-random")[0]: path for path in tmp_path.rglob("*.json")}
    assert set(kept) == {"torch", "cpu-int8"}
    assert out.count("Verdict") == 2
    found = read(kept["cpu-int8"])
    assert found.dtype == "int8"
    assert {row.path[-1] for row in found.phase("decode").spans} >= {"sampled", "computed", "others awaited"}
    kept["torch"].write_text("{}")
    code, _, err = run(*words)
    assert "replaces a session that cannot be opened any more" in err
    assert f"replaces one of {found.origin['time']}, commit" in err


def test_show_and_compare(run: Run, kept: Path) -> None:
    code, out, _ = run("profile", str(kept / "a.json"), "--gpu", "t4", "--layers")
    assert code == 0
    assert "h.11" in out
    assert "A projection, not a measurement" in out
    code, out, _ = run("profile", "compare", str(kept / "a.json"), str(kept / "b.json"))
    assert code == 0
    assert "fused attention" in out
    code, out, _ = run("profile", "compare", str(kept / "a.json"), str(kept / "b.json"), "--json")
    assert json.loads(out)[0]["phase"] == "decode"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["naiv"], "did you mean 'naive'"),
        (["torch", "--phase", "lunch"], "unknown phase 'lunch'"),
        (["torch", "--steps", "0"], "steps must be at least 1"),
        (["torch", "--steps", "100000"], "more than a profile keeps"),
        (["torch", "--dtype", "fp64"], "unknown dtype"),
        (["torch", "--html", "/nowhere/at/all.html"], "there is no folder"),
        (["torch", "--gpu", "abacus"], "nothing is known of a GPU"),
        (["missing.json"], "cannot read missing.json"),
        (["compare", "a.json"], "two sessions are compared"),
        (["torch", "missing.json"], "unknown method 'missing.json'"),
        (["torch:fp64"], "unknown dtype 'fp64'"),
        (["torch,naive", "--html", "a.html"], "--html is for one method, not 2"),
        (["torch", "--dtype", "fp32,bf16", "--json"], "--json is for one method, not 2"),
        (["torch", "--dtype", "int8", "--device", "cpu", "-m", SMALL], "torch has no int8"),
        (["cpu-int8", "--dtype", "fp16", "--device", "cpu", "-m", SMALL], "cpu-int8 has no fp16"),
        (["onnxruntime", "--device", "cpu", "-m", SMALL], "cannot be profiled here"),
        (["persistent", "--device", "cpu", "-m", SMALL], "runs on cuda only"),
        (["ctranslate2", "--device", "cpu", "-m", SMALL], "cannot be profiled here"),
    ],
)
def test_bad_input(run: Run, words: list[str], message: str) -> None:
    code, _, err = run("profile", *words)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_damaged_session(run: Run, kept: Path) -> None:
    path = kept / "a.json"
    path.write_text(path.read_text()[:-100])
    code, _, err = run("profile", str(path))
    assert code == 2
    assert "was it cut short" in err
    code, _, err = run("profile", str(kept / "b.json"), "--phase", "prefill")
    assert (code, "choose from: decode" in err) == (2, True)
    code, _, err = run("profile", str(kept / "b.json"), "--session", str(kept))
    assert (code, "cannot write" in err) == (2, True)
