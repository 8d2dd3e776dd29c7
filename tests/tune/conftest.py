"""A cache for the test alone, and no compilation: a sweep between compiling and timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from warpline.kernels import choices
from warpline.kernels.catalog import find
from warpline.tune.candidates import Case, cases

GPU = "NVIDIA Imaginary 1"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    choices.forget()
    return tmp_path / "cache"


@pytest.fixture
def case() -> Case:
    """Return the case of LayerNorm with one row in fp16."""
    return cases([find("layernorm")], ["fp16"], "sm_90")[0]
