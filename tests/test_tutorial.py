"""The tutorial runs from top to bottom on a machine without a GPU or a network, and prints what it says it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import run_alone

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What is installed already, what other tests run (make, serve), and what asks a server.
ELSEWHERE = ("python3 -m venv", "pip install", "make ", "warpline serve", "curl ")


def blocks(*kinds: str) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(TEXT) if kind in kinds]


@pytest.mark.parametrize("page", ["README.md", "docs/reference/python.md"])
def test_python_of_other_pages(page: str, tmp_path: Path) -> None:
    (code,) = [text for kind, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if kind == "python"]
    assert len(run_alone(["-c", code], tmp_path).split()) > 20


def test_commands_and_python(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    commands = [line[2:] for _, text in blocks("console") for line in text.splitlines() if line.startswith("$ ")]
    ran = [command for command in commands if not command.startswith(ELSEWHERE)]
    assert [command.split()[:2] for command in ran] == [
        ["warpline", verb] for verb in ("generate", "models", "doctor", "export")
    ]
    printed = [run_alone(["-m", "warpline", *shlex.split(command)[1:]], tmp_path) for command in ran]
    assert printed[0].startswith("The dragon was hungry.")
    assert "stories" in printed[1]

    out = run_alone(["-c", "\n".join(text for kind, text in blocks("python"))], tmp_path)
    at, expected = 0, [text for _, text in blocks("text")]
    assert len(expected) >= 5
    for text in expected:
        found = out.find(text, at)
        assert found >= 0, f"{text!r} is not in {out[at:]!r}"
        at = found + len(text)
