"""`warpline bench` checks its requirements before it measures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from warpline.bench.run import Bench
from warpline.bench.workloads import Settings
from warpline.cli import bench


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


def test_minutes_are_minutes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def noted(wanted: Any, methods: Any, settings: Settings, save: Any, *, quiet: bool) -> Any:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_run", noted)
    options = ("--minutes", "2", "--patience", "7", "--budget", "5", "--repetitions", "4", "--device", "cpu")
    assert run("bench", *options)[0] == 130
    (settings,) = seen
    assert (settings.limit_seconds, settings.patience_seconds, settings.budget_seconds) == (120, 7, 5)
    assert settings.repetitions == 4
