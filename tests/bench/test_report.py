"""Rows become tables, pictures and comparisons."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import case
from warpline.bench import charts, compare, report
from warpline.bench.page import page
from warpline.bench.rows import SCHEMA
from warpline.errors import ConfigError
from warpline.model.weights import load


def test_report(rows: list[dict[str, Any]]) -> None:
    text = report.markdown(rows)
    assert "| naive |" in text
    assert "static-kv-graph (missing: runs on cuda only)" in text
    assert text.count("**decode") == 2
    timed = [row | {"tokens_per_second": rate} for row, rate in zip(rows[:2], (40.0, 90.0), strict=True)]
    for workload, ratio in (("decode", 90 / 40), ("reference", rows[0]["seconds"] / rows[1]["seconds"])):
        table = report.table([row | {"workload": workload} for row in timed])
        first, second = (dict(zip(report.TITLES, line, strict=True)) for line in table)
        assert first["× naive"] == ""  # the baseline is not compared with itself
        assert second["× naive"] == f"{ratio:.2f}×"  # of decoding as the column tok/s is, without the prompt's time
    assert report.as_csv(rows).count("\n") == len(rows) + 1


def test_card(rows: list[dict[str, Any]]) -> None:
    weights = load("stories")
    lines = dict(report.card(weights.config, case(model="stories", prompt=16, new=100), 20.0))
    assert "77.3 MB" in lines["model"]
    assert lines["KV cache"].startswith("16,384 bytes")
    assert "tokens/s" in lines["so at best"]


def test_charts_and_page(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    pictures = charts.charts(rows)
    assert len([name for name in pictures if name.startswith("context-")]) == 1
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())
    assert all(path.exists() for path in charts.save(pictures, tmp_path / "new"))
    text = page(rows, pictures)
    assert text.count("data:image/png;base64,") == len(pictures)
    assert "http" not in text.replace("http-equiv", "")


def test_rows_without_a_rate_are_not_drawn(rows: list[dict[str, Any]]) -> None:
    """Where noise exceeds the time of decoding, a row has no rate; a case without any has no bars."""
    without = [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]
    assert not [name for name, (draw, _) in charts.pictures(without).items() if draw is charts.bars]
    ok = next(i for i, row in enumerate(rows) if row["status"] == "ok")
    mixed = [without[ok] if i == ok else row for i, row in enumerate(rows)]
    assert all(data.startswith(b"\x89PNG") for data in charts.charts(mixed).values())


def test_compare(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    before, after = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    timed = [row for row in rows if row["status"] == "ok"]
    halved = [row | {"seconds_mean": row["seconds_mean"] / 2, "seconds_sigma": 1e-9} for row in timed]
    exact = [row | {"seconds_sigma": 1e-9} for row in timed]
    before.write_text("".join(json.dumps(row) + "\n" for row in exact))
    after.write_text(json.dumps(halved))
    found = compare.compare(compare.read(before), compare.read(after))
    assert {one.verdict for one in found} == {"faster"}
    assert all(one.ratio == pytest.approx(0.5) for one in found)
    noisy = [row | {"seconds_sigma": row["seconds_mean"]} for row in halved]
    assert {one.verdict for one in compare.compare(exact, noisy)} == {"same"}
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare.compare(exact[:1], halved[1:2])
    after.write_text(json.dumps([exact[0] | {"schema": SCHEMA + 1}]))
    with pytest.raises(ConfigError, match="newer warpline"):
        compare.read(after)
    after.write_text("hello")
    with pytest.raises(ConfigError, match="holds no bench rows"):
        compare.read(after)
    with pytest.raises(ConfigError, match="No such file"):
        compare.read(tmp_path / "none")


def test_only_the_newest_run_of_a_case_counts_and_who_is_missing_from_it_is_named() -> None:
    def row(method: str, seconds: float, day: int = 1, **more: Any) -> dict[str, Any]:
        measured = {
            "seconds": seconds,
            "seconds_p20": seconds,
            "seconds_p80": seconds,
            "seconds_mean": seconds,
            "seconds_sigma": 0.0,
            "tokens_per_second": 1.0,
        }
        made = {
            "method": method,
            "agreeing": 1.0,
            "repetitions": 3,
            "status": "ok",
            "time": f"2026-12-{day:02}",
            **measured,
        }
        return asdict(case(model="stories")) | made | more

    earlier = [
        row("naive", 2.0),
        row("torch", 1.0),
        row("hf-sdpa", 3.0),
        row("static-kv", 4.0, status="wrong", why="x"),
    ]
    later = [row("naive", 2.5, 2), row("graph", 0.1, 2)]
    found = report.newest([*earlier, *later, row("naive", 9.0, batch=8)])
    assert [(r["method"], r["status"]) for r in found if r["batch"] == 1] == [
        ("naive", "ok"), ("graph", "ok"), ("torch", "left out"), ("hf-sdpa", "left out"),
    ]  # fmt: skip
    assert found[0]["seconds"] == 2.5
    assert [r["seconds"] for r in found if r["batch"] == 8] == [9.0]
    assert "torch, hf-sdpa (left out: only in other runs)" in report.markdown(found)
    found = report.newest([*earlier, *later], having="hf-sdpa")
    assert [r["method"] for r in found if r["status"] == "ok"] == ["naive", "torch", "hf-sdpa"]
    assert found[0]["seconds"] == 2.0
