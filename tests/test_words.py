"""Words that docs/glossary.md has retired stay out of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for kind in ("py", "cuh", "js", "html") for path in sorted((ROOT / "src").rglob(f"*.{kind}"))]


def retired() -> list[str]:
    """Return the words in the first column of the glossary's last table."""
    table = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Retired words")[2]
    return [
        word
        for line in table.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`(\w+)`", line.split("|")[1])
    ]


def found(text: str) -> set[str]:
    """Return the retired words in a text, whole or as a part of a name between underscores."""
    words = set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", lambda match: match[1].lower(), text)))
    return words & set(retired())


def test_there_are_retired_words() -> None:
    assert {"coolness", "desk", "nobody"} <= set(retired())
    assert found("the desk's coolness, some_desk, Nobody") == {"desk", "coolness", "nobody"}
    assert not found("desktop")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_no_retired_word_comes_back(path: Path) -> None:
    assert not found(path.read_text(encoding="utf-8"))
