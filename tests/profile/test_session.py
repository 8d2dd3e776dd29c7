"""A session is unchanged when it is opened again; anything else raises one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.profile.conftest import made_up
from warpline.errors import ConfigError
from warpline.profile.session import Session, dumps, loads, read, save


def same(a: Session, b: Session) -> bool:
    return json.loads(dumps(a)) == json.loads(dumps(b)) and a.phases == b.phases


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_opened_again(tmp_path: Path, name: str) -> None:
    session = made_up(gap=1.0)
    save(session, tmp_path / name)
    assert same(read(tmp_path / name), session)
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')


def test_recorded_is_opened_again(recorded: Session) -> None:
    again = loads(dumps(recorded))
    assert again.config == recorded.config
    for a, b in zip(again.phases, recorded.phases, strict=True):
        assert a.work == b.work
        assert a.busy_us == pytest.approx(b.busy_us, rel=1e-5)
        assert [row.path for row in a.spans] == [row.path for row in b.spans]


def damaged(change: str) -> str:
    raw: dict[str, Any] = json.loads(dumps(made_up()))
    phase = raw["phases"][0]
    match change:
        case "newer":
            raw["warpline_profile"] = 99
        case "older":
            raw["warpline_profile"] = 1
        case "no phases":
            raw["phases"] = []
        case "zero step":
            phase["step_us"] = 0
        case "not a number":
            phase["step_us"] = "soon"
        case "unknown phase":
            phase["name"] = "lunch"
        case "missing words":
            raw["words"] = []
        case "short row":
            phase["spans"][0] = [0]
        case "bad config":
            raw["config"]["n_embd"] = 7
        case "unknown field":
            phase["work"]["speed"] = 1
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("newer", "newer warpline"),
        ("older", "older warpline .* record it again"),
        ("no phases", "nothing was recorded"),
        ("zero step", "no positive number"),
        ("not a number", "holds no profile"),
        ("unknown phase", "unknown phase 'lunch'"),
        ("missing words", "holds no profile"),
        ("short row", "holds no profile"),
        ("bad config", "not divisible"),
        ("unknown field", "holds no profile"),
    ],
)
def test_damage_is_named(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        loads(damaged(change), "a.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", dumps(made_up())[:-200], "[1]", "{}", '{"warpline_profile": "1"}', "3"])
def test_foreign_or_truncated(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json"):
        read(tmp_path / "a.json")


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "missing.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(dumps(made_up()).encode())[:-20])
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "cut.json.gz")
    (tmp_path / "picture.json").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConfigError, match="no text"):
        read(tmp_path / "picture.json")


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        save(made_up(), tmp_path / "file" / "a.json")


def test_unknown_phase_is_named() -> None:
    with pytest.raises(ConfigError, match="choose from: decode"):
        made_up().phase("prefill")
