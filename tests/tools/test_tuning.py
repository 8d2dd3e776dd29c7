"""The package's choices and the documents on sweeps match the recorded rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import benchmarks, tuning
from warpline.kernels import choices
from warpline.kernels.catalog import CATALOG


def test_shipped_choices_are_not_stale() -> None:
    wanted = tuning.shipped()
    assert {*choices.SHIPPED.glob("*.json")} == {*wanted}, "run: make readme"
    assert all(path.read_text(encoding="utf-8") == text for path, text in wanted.items()), "run: make readme"


def test_pictures_are_not_stale() -> None:
    wanted = tuning.drawn()
    assert {path.name for path in benchmarks.IMAGES.glob("tune-*.png")} == {*wanted}, "run: make readme"
    assert not [name for name, (_, rows) in wanted.items() if benchmarks.is_stale(name, rows)], "run: make readme"


@pytest.mark.parametrize("path", sorted(choices.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_choices_are_ones_that_kernels_have(path: Path) -> None:
    gpu = json.loads(path.read_text())["gpu"]
    for choice in choices.read(path, gpu):
        spec = CATALOG[choice.kernel]
        assert not choice.is_stale
        dims = next(dims for dims in spec.bench_dims if choices.shape_class(spec, dims) == choice.shape)
        assert choice.tunables is not None
        assert choices.fits(spec, choice.dtype, dims, choice.tunables)


def test_no_rows_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    assert tuning.gains() == "No sweep has been recorded yet."
    assert tuning.drawn() == {}
    assert tuning.shipped() == {}
