"""The parts of a release: the package's page, the citation, the notebook's outputs, the animation."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from tools import animation, notebook
from warpline import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the build hook; build packages need not be installed for tests."""
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(
        sys.modules["hatchling.metadata.plugin.interface"], "MetadataHookInterface", object, raising=False
    )
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", [None, "https://host.example/us/warpline"])
def test_the_page_of_the_package_stands_alone(hook: Any, source: str | None) -> None:
    text = hook.page((ROOT / "README.md").read_text(encoding="utf-8"), source)
    assert not re.search(r"\]\((?!https?:|#)", text)
    assert "Warpline" in text
    assert ("host.example/us/warpline/blob/main/docs/cpu.md" in text) is (source is not None)
    assert ("/raw/main/docs/images/" in text) is (source is not None)


def test_links_of_all_kinds(hook: Any) -> None:
    text = "![a](x.png) [b](docs/y.md#z) [c](https://e.example) [d](#here)"
    assert hook.page(text, None) == " b [c](https://e.example) [d](#here)"
    assert hook.page(text, "https://s/").startswith(
        "![a](https://s/raw/main/x.png) [b](https://s/blob/main/docs/y.md#z)"
    )


def test_the_citation_and_classifiers_are_of_this_version() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sum(line.startswith("Programming Language :: Python :: 3.") for line in project["classifiers"]) == 3


def test_a_notebook_is_filled_with_what_its_cells_print(tmp_path: Path) -> None:
    def cell(*source: str) -> dict[str, Any]:
        return {"cell_type": "code", "source": list(source), "outputs": [], "execution_count": None}

    cells = [cell("x = 2\n", "print(x)"), {"cell_type": "markdown"}, cell(f"print({str(tmp_path)!r}, x)")]
    made = notebook.filled({"cells": cells}, tmp_path)
    first, _, second = made["cells"]
    assert [first["execution_count"], second["execution_count"]] == [1, 2]
    assert first["outputs"][0]["text"] == ["2\n"]
    assert second["outputs"][0]["text"] == ["~ 2\n"]


def test_an_animation_shows_its_frames_one_after_the_other() -> None:
    text = animation.drawn([(1.0, ["$ warpline models", "a < b"]), (3.0, ["x"] * 40)])
    assert text.count("<g id=") == 2
    assert "25.000%" in text
    assert "a &lt; b" in text
    assert text.count(">x</text>") == animation.ROWS
    assert animation.IMAGE.stat().st_size < 400_000
    assert "warpline bench" in animation.IMAGE.read_text()
