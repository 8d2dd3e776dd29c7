"""What `warpline bench` needs is asked for before it measures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from warpline.bench.run import Bench


@pytest.mark.parametrize("option", ["--html", "--charts"])
def test_pictures_without_matplotlib(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "matplotlib" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(Bench, "prepare", lambda _: pytest.fail("it began to measure"))
    code, _, err = run("bench", option, str(tmp_path / "out"))
    assert code == 2
    assert "pip install 'warpline[plot]'" in err
