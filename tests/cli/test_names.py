"""Options mean the same in all verbs, and other programs' names for them work too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import Run
from tests.conftest import SMALL
from warpline import LLM, SamplingParams
from warpline.cli.main import app
from warpline.errors import ConfigError


def options(*verbs: str) -> dict[str, list[str]]:
    """Return the option names of each parameter of a verb."""
    command = typer.main.get_command(app)
    for verb in verbs:
        command = command.commands[verb]  # type: ignore[attr-defined]
    return {str(parameter.name): list(parameter.opts) for parameter in command.params}


@pytest.mark.parametrize("verb", ["generate", "chat", "batch", "hf", "diff", "bench run", "bench serve"])
def test_new_tokens(verb: str) -> None:
    assert any("--new-tokens" in names for names in options(*verb.split()).values())


@pytest.mark.parametrize("verb", ["hf", "diff", "profile", "bench run", "bench serve"])
def test_prompt_tokens(verb: str) -> None:
    assert any("--prompt-tokens" in names for names in options(*verb.split()).values())


def test_n_is_a_number_of_completions() -> None:
    verbs = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert [verb for verb in verbs if any("-n" in names for names in options(verb).values())] == ["generate"]


def test_every_summary_is_whole(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "..." not in out.partition("Commands:")[2]
    assert "<bool>" not in run("generate", "--help")[1]


def test_dtypes_of_others_everywhere(run: Run) -> None:
    settings = ("-m", SMALL, "--method", "torch", "--new-tokens", "4", "--repetitions", "1", "--device", "cpu")
    rows = json.loads(run("bench", *settings, "--dtype", "float32", "--json")[1])["rows"]
    assert [(row["dtype"], row["new"]) for row in rows] == [("fp32", 4)]


def test_diff_says_that_nothing_differs(run: Run) -> None:
    code, out, _ = run("diff", "-e", "cpu", "-m", SMALL, "--new-tokens", "2", "--prompt-tokens", "3", "--json")
    assert (code, json.loads(out)) == (0, {"differs": False})


def test_kernels_are_listed_under_either_name(run: Run) -> None:
    assert run("kernels", "list") == run("kernels")


def test_completion() -> None:
    asked = {"_WARPLINE_COMPLETE": "complete_bash", "COMP_WORDS": "warpline pro", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "warpline"], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["profile"])


def test_an_exported_folder_can_be_read_by_all_and_says_where_texts_end(run: Run, tmp_path: Path) -> None:
    run("export", "stories", str(tmp_path / "new"))
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "new").iterdir()}
    assert len(set(modes.values())) == 1
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text())["eos_token_id"] == 50256


def test_python_gets_a_sentence_for_what_is_no_text() -> None:
    llm = LLM(SMALL, device="cpu", dtype="fp32")
    assert repr(llm) == f"LLM({SMALL!r}, device='cpu', dtype='fp32', executor='cpu')"
    with pytest.raises(ConfigError, match="a prompt is a text or a list of token ids, not 123"):
        llm.generate(123, SamplingParams(max_tokens=1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="score takes a list of texts"):
        llm.score("a text")  # type: ignore[arg-type]
