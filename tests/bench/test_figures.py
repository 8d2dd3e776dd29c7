"""However noisy the timings, no impossible figure is reported."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.conftest import case
from tests.conftest import SMALL
from warpline.bench import report
from warpline.bench.figures import Times, figures
from warpline.bench.protocol import Sample
from warpline.model import cost
from warpline.model.weights import read_config

LIMITS = {"read_gb_s": 20.0, "product_tflop_s": 0.1}
SECONDS = st.lists(st.floats(1e-6, 100), min_size=1, max_size=7)


def shown(row: dict[str, Any]) -> dict[str, str]:
    return dict(zip(report.TITLES, report.cells(row), strict=True))


def whole_row(times: Times, kind: str, new: int) -> dict[str, Any]:
    one = case(kind=kind, new=new)
    made = figures(one, read_config(SMALL), times, "torch", LIMITS)
    return asdict(one) | {"method": "torch", "status": "ok", "agreeing": 1.0} | made


@given(SECONDS, SECONDS, st.sampled_from(["generate", "decode"]), st.integers(1, 200))
def test_made_up_timings_give_no_impossible_row(first: list[float], whole: list[float], kind: str, new: int) -> None:
    row = whole_row(Times(Sample(tuple(first)), Sample(tuple(whole))), kind, new)
    assert new == 1 or row.get("first_token_seconds", 0) < row["seconds"] or row["seconds"] == 0
    assert row.get("us_per_token", 1) > 0 or row["seconds"] < 1e-5  # below the precision of a figure
    cells, notes = shown(row), report.notes([row])
    beyond = row.get("percent_of_limit", 0) > 100
    assert cells["% of limit"].endswith("*") == beyond == any(note.startswith("*") for note in notes)
    assert ("†" in cells["method"]) == ("unsure" in row) == any(note.startswith("†") for note in notes)
    if "unsure" in row:
        assert not cells["µs/token"]
        assert not cells["% of limit"]


def test_every_field_of_a_row() -> None:
    config, one = read_config(SMALL), case(kind="generate", batch=2, new=11)
    times = Times(Sample((0.1, 0.3, 0.2)), Sample((0.6, 0.9, 0.8)))
    row = figures(one, config, times, "torch", LIMITS)
    assert row["seconds"] == 0.8
    assert row["first_token_seconds"] == 0.2
    assert row["tokens_per_second"] == 2 * 11 / 0.8
    assert row["us_per_token"] == pytest.approx(0.6e6 / 10)  # pairs differ by 0.5, 0.6 and 0.6 s
    moved = cost.decode_bytes(config, "fp32", lengths=[one.prompt] * 2, steps=10, screened=True)
    assert row["gb_s"] == round(moved / 0.6 / 1e9, 2)
    decode = figures(case(kind="decode", batch=2, new=11), config, times, "torch", LIMITS)
    assert decode["tokens_per_second"] == pytest.approx(2 * 10 / 0.6, abs=0.01)


def test_pairs_share_what_the_machine_did() -> None:
    """If one round is twice as slow, the median over pairs differs from the difference of medians."""
    times = Times(Sample((1.0, 10.0, 10.0)), Sample((2.0, 2.5, 11.0)))
    assert times.decode is None  # a first token after the last
    assert Times(Sample((1.0, 2.0, 1.0)), Sample((3.0, 4.0, 3.0))).decode == 2.0
    assert Times(Sample((1.0, 2.0, 6.0)), Sample((5.0,))).decode == 3.0  # with little time left


def test_rows_measured_before_are_marked_when_shown() -> None:
    row = whole_row(Times(Sample((0.1,)), Sample((0.5,))), "generate", 10) | {"first_token_seconds": 0.74}
    assert "†" in shown(row)["method"]
    assert shown(row)["first token ms"] == ""
    assert shown(row | {"first_token_seconds": 0.1, "percent_of_limit": 432.4})["% of limit"] == "432.4*"


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_codes_of_keys_and_values_count_as_what_they_are(kind: str) -> None:
    config, one = read_config(SMALL), case(kind=kind, batch=2, prompt=30, new=11 if kind == "decode" else 0)
    times = Times(Sample((0.1, 0.3, 0.2)), Sample((0.6, 0.9, 0.8)))
    plain, coded = (figures(one, config, times, name, LIMITS) for name in ("graph", "graph-int8-kv"))
    assert coded["percent_of_limit"] <= plain["percent_of_limit"]
    if kind == "decode":
        moved = cost.decode_bytes(config, "fp32", lengths=[30] * 2, steps=10, screened=True, kv_dtype="int8")
        assert coded["gb_s"] == round(moved / 0.6 / 1e9, 2) < plain["gb_s"]


def test_what_a_user_calls_is_what_loses() -> None:
    """The public call is compared with peers, however fast the executor below it is."""
    found = [asdict(case()) | {"status": "ok", "method": name} for name in ("warpline", "graph", "static-kv-compile")]
    for row, seconds in zip(found, (3.0, 1.0, 2.0), strict=True):
        row["seconds"] = seconds
    (line,) = report.losses(found)
    assert "`static-kv-compile` is 1.50 times as fast as our `warpline`, in 1 of 1 cases" in line
    assert not report.losses(found[1:])


def test_codes_are_no_loss_of_ours() -> None:
    """A method that computes something else cannot be ahead of ours."""
    shared = {"status": "ok", "workload": "batch", "model": "gpt2", "dtype": "fp16", "batch": 8, "prompt": 16, "new": 9}
    rows = [
        shared | {"method": name, "seconds": s}
        for name, s in (("graph", 2.0), ("graph-int8-kv", 1.0), ("hf-sdpa", 3.0))
    ]
    assert not report.losses([asdict(case()) | row for row in rows])
