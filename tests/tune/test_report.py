"""Results become rows, tables, pictures and shipped choices, and are read back from a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from warpline.bench.charts import png
from warpline.errors import ConfigError
from warpline.kernels.catalog import find
from warpline.kernels.choices import PROJECTED
from warpline.tune import report
from warpline.tune.candidates import Case, cases
from warpline.tune.journal import Attempt
from warpline.tune.sweep import Result

ORIGIN = {"gpu": "NVIDIA Imaginary 1", "commit": "c" * 40}


def attempt(values: tuple[int, int], us: float) -> Attempt:
    return Attempt(values, us, us * 0.999, us * 1.001, 10.0, 9.99)


@pytest.fixture
def results(case: Case) -> list[Result]:
    """Return four results: one improved, one confirmed, one failed, one without time."""
    _, second, third, fourth, *_ = (one for one in cases([find("layernorm")], ["fp16"], "sm_90") if not one.overlapping)
    improved = Result(case, attempts={(128, 1): attempt((128, 1), 10.0), (256, 2): attempt((256, 2), 8.0)})
    improved.attempts[512, 1] = Attempt((512, 1), why="no answer within 20 s")
    improved.pruned[1024, 1] = "spilled registers"
    confirmed = Result(second, attempts={(128, 1): attempt((128, 1), 10.0)}, left_out={(256, 1), (128, 1)})
    late = Result(fourth, left_out={(128, 1)})
    return [improved, confirmed, Result(third, why="the default fails: y differs"), late]


def test_rows_say_everything(results: list[Result]) -> None:
    improved, confirmed, failed, late = report.rows(results, ORIGIN)
    assert improved["verdict"] == "improved"
    assert improved["best"] == {"block": 256, "row_warps": 2}
    assert (improved["default_us"], improved["best_us"], improved["tried"]) == (10.0, 8.0, 2)
    assert improved["failed"] == [[512, 1, "no answer within 20 s"]]
    assert improved["pruned"] == {"spilled registers": 1}
    assert improved["times"] == [[128, 1, 10.0, 10.0], [256, 2, 8.0, 10.0]]
    assert (confirmed["verdict"], confirmed["left_out"]) == ("confirmed", 1)
    assert (failed["verdict"], failed["why"]) == ("failed", "the default fails: y differs")
    assert (late["verdict"], late["left_out"], late["tried"]) == ("left out", 1, 0)
    assert report.gain(improved) == pytest.approx(0.2)
    assert report.gain(failed) is None
    json.dumps([improved, confirmed, failed, late])


def test_table_and_summary(results: list[Result]) -> None:
    rows = report.rows(results, ORIGIN)
    lines = [report.line(row) for row in rows]
    assert lines[0][3:8] == ("alone", "128 1", "10.00", "block 128→256, row_warps 1→2", "8.00")
    assert lines[0][8:] == ("20 %", "2", "1", "1", "0")
    assert lines[1][6:9] == ("default", "10.00", "confirmed")
    assert lines[2][5:9] == ("n/a", "the default fails: y differs", "n/a", "failed")
    assert lines[3][5:9] == ("n/a", "there was no time", "n/a", "left out")
    assert all(len(line) == len(report.TITLES) for line in lines)
    text = report.summary(rows)
    assert text.startswith("4 cases: 1 improved (by 20 to 20 %, median 20 %), 1 confirmed, 1 failed, 1 left out;")
    assert "; 1 candidates failed and were skipped; 2 candidates were left out" in text
    assert report.failures(rows) == ["layernorm fp16 block=512 row_warps=1: no answer within 20 s"]


def test_a_model_confirms_nothing(case: Case) -> None:
    result = Result(case, PROJECTED, attempts={(128, 1): attempt((128, 1), 10.0)})
    (row,) = report.rows([result], ORIGIN)
    assert row["verdict"] == "kept"
    assert "times" not in row
    assert report.summary([row]).startswith("1 cases: 0 improved, 1 kept; projected from")


def test_a_choice_is_an_improvement_or_none_and_the_newest_counts(results: list[Result]) -> None:
    rows = report.rows(results, ORIGIN)
    improved, confirmed = report.choices(rows)
    assert (improved.tunables, confirmed.tunables) == ({"block": 256, "row_warps": 2}, None)
    assert (improved.kernel, improved.dtype, improved.shape, improved.digest) == results[0].case.key
    again = rows[0] | {"verdict": "confirmed", "best": rows[0]["default"]}
    assert [choice.tunables for choice in report.choices([*rows, again])] == [None, None]


def test_a_choice_is_good_in_every_way_to_launch(case: Case) -> None:
    """Alone (512, 1) is best and overlapping (1024, 4), each slower the other way; (256, 2) is good in both."""

    def row(overlapping: bool, *us: float) -> report.Row:
        times = dict(zip(((128, 1), (256, 2), (512, 1), (1024, 4)), (10.0, *us), strict=True))
        result = Result(replace(case, overlapping=overlapping), attempts={v: attempt(v, t) for v, t in times.items()})
        return report.rows([result], ORIGIN)[0]

    alone, chained = row(False, 9.0, 7.0, 11.0), row(True, 9.5, 10.1, 6.0)
    (choice,) = report.choices([alone, chained])
    assert choice.tunables == {"block": 256, "row_warps": 2}
    (choice,) = report.choices([alone, row(True, 10.2, 10.1, 6.0)])
    assert choice.tunables is None
    other = chained | {"digest": "of other code", "time": "2030"}
    (choice,) = report.choices([alone, other])
    assert (choice.digest, choice.tunables) == ("of other code", {"block": 1024, "row_warps": 4})


def test_a_recorded_sweep_is_read_back(results: list[Result], tmp_path: Path) -> None:
    rows = report.rows(results, ORIGIN)
    (tmp_path / "tune.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    assert report.read(tmp_path) == report.read(tmp_path / "tune.jsonl") == rows
    with pytest.raises(ConfigError, match="there is no"):
        report.read(tmp_path / "nothing.jsonl")
    for text in ("{", "[1]\n", "{}\n", "\x00"):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="is not what 'warpline tune --save' writes"):
            report.read(tmp_path / "bad.jsonl")


def test_the_picture_is_drawn(results: list[Result]) -> None:
    data = png(report.heat_map, report.rows(results, ORIGIN))
    assert data.startswith(b"\x89PNG")
