"""What `auto` knows of speeds: out of a benchmark's rows, into files and back, and nearest to what is asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from warpline.engine import speeds
from warpline.engine.speeds import Speed
from warpline.errors import ConfigError
from warpline.model.weights import read_config

GPU = "Some GPU"
GPT2 = read_config("random:gpt2")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path))
    speeds.forget()
    return tmp_path


def row(method: str, us: float, **changes: Any) -> dict[str, Any]:
    usual = {"kind": "generate", "gpu": GPU, "model": "random:gpt2", "dtype": "fp16", "batch": 1, "prompt": 16}
    return (
        usual
        | {"new": 100, "window": None, "status": "ok", "repetitions": 5, "method": method, "us_per_token": us}
        | changes
    )


def asked(batch: int = 1, context: int = 66, dtype: str = "fp16") -> Mapping[str, float]:
    speeds.forget()
    return speeds.compared(GPU, GPT2, dtype, batch, context)


def test_what_was_measured_last_is_found() -> None:
    assert asked() == {}
    speeds.remember([row("graph", 140), row("persistent", 118), row("static-kv", 600)])
    speeds.remember([row("graph", 135)])
    assert asked() == {"graph": 135, "persistent": 118}
    assert asked(dtype="fp32") == {}
    assert speeds.compared(GPU, read_config("random:gpt2-xl"), "fp16", 1, 66) == {}


def test_the_nearest_place_decides_and_far_ones_do_not() -> None:
    for batch, new, us in ((1, 100, 1.0), (1, 900, 2.0), (8, 100, 3.0)):
        speeds.remember([row(name, us, batch=batch, new=new) for name in speeds.EXECUTORS])
    near = {(1, 20): 1.0, (1, 700): 2.0, (2, 30): 1.0, (4, 800): 3.0, (8, 30): 3.0, (16, 30): 3.0}
    assert {place: asked(*place).get("graph") for place in near} == near
    assert asked(17) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 64},
        {"kind": "prefill"},
        {"status": "wrong"},
        {"gpu": None},
        {"us_per_token": None},
        {"repetitions": 1},
    ],
)
def test_other_rows_count_for_nothing(changes: dict[str, Any]) -> None:
    speeds.remember([row("graph", 1.0), row("persistent", 2.0, **changes)])
    assert asked() == {}  # there is nobody to compare with


def test_the_users_come_before_the_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(speeds, "SHIPPED", tmp_path)
    place = (speeds.shape_of(GPT2), "fp16", 1, 66)
    shipped = [Speed(*place, "graph", 9.0), Speed(*place, "persistent", 8.0)]
    speeds.shipped_file(GPU).write_text(speeds.text(shipped))
    assert asked() == {"graph": 9.0, "persistent": 8.0}
    speeds.remember([row("graph", 1.0), row("persistent", 2.0)])
    assert asked() == {"graph": 1.0, "persistent": 2.0}


@pytest.mark.parametrize("damage", ["", "[", "{}", '[{"model": "x"}]', '[{"us": -1}]'])
def test_a_damaged_file_is_named(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = speeds.user_file(GPU)
    path.parent.mkdir()
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert asked() == {}
    assert f"cannot use {path}" in caplog.text


def test_an_unwritable_folder_is_named(cache: Path) -> None:
    (cache / "speeds").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot write .*WARPLINE_CACHE_DIR"):
        speeds.remember([row("graph", 1.0)])
