"""docs/scale.md shows the newest rows."""

from __future__ import annotations

from typing import Any

import pytest

from tools import scaling


def test_the_picture_is_not_stale() -> None:
    assert not scaling._loads() or not scaling.is_stale(), "run: make readme"


def row(share: float | None, **changes: Any) -> dict[str, Any]:
    measured = {"output_throughput": 100.0, "p50_ttft_ms": 10.0, "p99_ttft_ms": 20.0, "p50_tpot_ms": 2.0}
    simulated = {f"simulated_{name}": 1.1 * value for name, value in measured.items()}
    load = {"request_rate": 3.0, "input_len": 32, "output_len": 32, "spread": 0.5, "model": "stories", "device": "CPU"}
    return {"kind": "load", "share": share, **load, **measured, **simulated, **changes}


def test_the_newest_run_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(None), row(0.5, output_throughput=1.0), row(None), row(0.5), row(0.95)]
    monkeypatch.setattr(scaling, "scale_rows", lambda: rows)
    text = scaling.simulator()
    assert "| 50 % (3/s) | 100.0 / 110.0 (+10 %) | 10.0 / 11.0 (+10 %) |" in text
    assert text.count("all at once") == 1
    assert len(scaling.chart(rows[2:]).axes) == 2
    monkeypatch.setattr(scaling, "scale_rows", list)
    assert "Not measured yet" in scaling.simulator()
    assert scaling.replicas() == "Not measured yet."


def test_what_replicas_give_and_ray_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"kind": "replicas", "replicas": 1, "output_throughput": 500.0}
    single = {"kind": "ttft", "label": "straight", "median_ttft_ms": 5.0, "median_way_ms": 1.0, "p99_way_ms": 2.0}
    rows = [one, one | {"replicas": 2, "output_throughput": 950.0}, single]
    rows.append(single | {"label": "Ray, HAProxy", "median_way_ms": 1.5})
    monkeypatch.setattr(scaling, "scale_rows", lambda: rows)
    assert "| 500 | 950 | 1.90× |" in scaling.replicas()
    assert "**Ray adds 0.50 ms**" in scaling.replicas()
