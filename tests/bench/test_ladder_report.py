"""Rows of a climb as a table, a picture and a page; `warpline ladder` on a machine without a GPU."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from warpline.bench import ladder_report as report
from warpline.bench.rows import append
from warpline.cli.main import main
from warpline.errors import ConfigError
from warpline.kernels.ladder import LADDERS

Row = dict[str, Any]


def recorded(
    name: str, *, time: str = "2026-01-02T03:04:05", shape: str | None = None, slower: float = 1.0
) -> list[Row]:
    """Return rows of a climb with made-up times: rungs twice as fast, one that ties, variants that lose."""
    ladder = LADDERS[name]
    origin = {"schema": 1, "time": time, "commit": "c" * 40, "source": "s" * 16, "dirty": False, "gpu": "NVIDIA Test"}
    origin |= {"torch": "2.0", "copy_gb_s": 4000.0, "ladder": name, "shape": shape or ladder.shape_of(ladder.dims)}
    rows: list[Row] = []
    us, figures = (
        1000.0 * slower,
        {"status": "ok", "bound": "compute", "percent_of_roof": 12.5, "peak_tflop_s": 50.0, "dims": dict(ladder.dims)},
    )
    for i, rung in enumerate(ladder.rungs):
        gain = None if i == 0 else 0.5 if rung.variant else 1.001 if i == 2 else 2.0
        time_us = us / (gain or 1)
        us = us if rung.variant else time_us
        rates = {"us": time_us, "gain": gain, "gb_s": 1e5 / time_us, "tflop_s": 1e3 / time_us, "dtype": rung.dtype}
        rows.append(origin | figures | rates | {"rung": rung.name, "kind": "variant" if rung.variant else "rung"})
    for yardstick in ladder.yardsticks:
        rates = {"us": us / 2, "gain": None, "gb_s": 2e5 / us, "tflop_s": 2e3 / us, "dtype": ladder.climb[-1].dtype}
        rows.append(origin | figures | rates | {"rung": yardstick, "kind": "yardstick"})
    return rows


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["ladder", *words])
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out, printed.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in LADDERS:
        append(tmp_path, "ladder", recorded(name))
    append(tmp_path, "ladder", recorded("softmax", time="2026-02-02T03:04:05", slower=3))
    append(tmp_path, "ladder", recorded("softmax", time="2026-03-02T03:04:05", shape="5x7"))
    return tmp_path


def test_the_measurement_says_what_loses() -> None:
    rows = recorded("matmul")
    found = {row["rung"]: report.verdict(row) for row in rows}
    assert (found["naive"], found["cuBLAS"]) == ("", "")
    assert (found["restrict"], found["constant bias"], found["float4"]) == ("same", "loses", "gains")
    table = report.markdown(rows)
    assert "| constant bias (aside) | fp32 |" in table
    assert "0.50× loses" in table
    assert "[cuBLAS]" in table
    assert "'tensor cores' takes 2.00 times as long." in table
    assert report.span(rows).endswith("Losing here: constant bias.")
    assert len(table.splitlines()) == len(rows) + 2


def test_a_rung_that_does_not_exist_there_is_named() -> None:
    rows = recorded("matmul")
    rows[4] = {
        **{k: v for k, v in rows[4].items() if k not in ("us", "gain", "gb_s", "tflop_s")},
        "status": "impossible",
    }
    assert "does not exist at this shape" in report.markdown(rows).splitlines()[6]
    assert "constant bias" not in report.svg(rows)


def test_only_one_run_is_shown(folder: Path) -> None:
    climbs = report.newest(report.read(folder))
    assert [(rows[0]["ladder"], rows[0]["time"][:7]) for rows in climbs] == [
        ("matmul", "2026-01"),
        ("layernorm", "2026-01"),
        ("softmax", "2026-02"),
        ("gelu", "2026-01"),
        ("attention", "2026-01"),
        ("softmax", "2026-03"),
    ]


def test_the_picture_is_well_formed_and_says_everything() -> None:
    rows = recorded("attention")
    picture = report.svg(rows)
    texts = [element.text or "" for element in ElementTree.fromstring(picture).iter() if element.tag.endswith("text")]
    assert "TFLOP/s" in texts[0]
    for row in rows:
        assert any(text.startswith(f"{row['rung']} {row['dtype']}") for text in texts)
    assert picture.count("<rect") == len(rows)


def test_page_fetches_nothing(folder: Path) -> None:
    text = report.page(report.newest(report.read(folder)))
    assert not re.findall(r"(?:src|href)=|url\(|@import|<script", text)
    assert "color-scheme: light dark" in text
    assert text.count("<svg") == 6


def test_replay(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    code, out, _ = command(capsys, "matmul", "--from", str(folder))
    assert code == 0
    assert "tensor cores" in out
    assert "loses" in out
    assert "softmax" not in out.lower()
    code, out, _ = command(capsys, "softmax", "--from", str(folder), "--shape", "5x7", "--json")
    rows = json.loads(out)
    assert {row["shape"] for row in rows} == {"5x7"}
    assert rows[0]["why"] == LADDERS["softmax"].rungs[0].why
    (tmp_path / "rows.json").write_text(out)  # output of --json can be shown as well
    html = tmp_path / "page.html"
    code, out, _ = command(capsys, "--from", str(tmp_path / "rows.json"), "--html", str(html))
    assert (code, "Softmax 5×7" in out, html.exists()) == (0, True, True)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys)
    assert code == 0
    assert all(name in out for name in LADDERS)
    rows = json.loads(command(capsys, "--json")[1])
    assert len(rows) == sum(len(ladder.rungs) for ladder in LADDERS.values())


def test_compiles_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "gelu", "--arch", "sm_86", "--shape", "7x16386", "--json")
    rows = json.loads(out)
    assert (code, len(rows)) == (0, len(LADDERS["gelu"].rungs))
    assert {row["arch"] for row in rows} == {"sm_86"}
    left_out = [row for row in rows if row["registers"] is None]
    assert [(row["rung"], row["why"]) for row in left_out] == [("constant bias", "does not exist at this shape")]
    if not torch.cuda.is_available():
        code, out, err = command(capsys, "softmax")
        assert (code, err.count("\n")) == (0, 1)
        assert "timing needs a CUDA GPU" in err
        assert out.count("sm_75") == len(LADDERS["softmax"].rungs)
        code, _, err = command(capsys, "softmax", "--save", ".")
        assert (code, "those a CUDA GPU" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["matmull"], "did you mean 'matmul'"),
        (["matmul", "--shape", "3x5"], "the shape of matmul is ROWSxOUTPUTSxINPUTS"),
        (["matmul", "gelu", "--shape", "3x5"], "--shape is the shape of one ladder"),
        (["--shape", "3x5"], "--shape is the shape of one ladder"),
        (["matmul", "--arch", "sm_91"], "did you mean 'sm_90'"),
        (["--save", "."], "name a ladder, or all"),
        (["matmul", "--html", "/none/a.html"], "there is no folder"),
        (["--from", "/none/a.jsonl"], "cannot read"),
        (["--from", "a.jsonl", "--save", "."], "--from shows what was recorded"),
        (["--from", "{empty}"], "no climb is recorded below"),
        (["--from", "{empty}/wrong.jsonl"], "holds no climb"),
        (["--from", "{empty}/newer.jsonl"], "newer warpline"),
        (["matmul", "--from", "{empty}/gelu.jsonl"], "has no climb of matmul"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    gelu = recorded("gelu")
    (tmp_path / "wrong.jsonl").write_text('{"us": 1}\n')
    (tmp_path / "newer.jsonl").write_text(json.dumps(gelu[0] | {"schema": 99}))
    (tmp_path / "gelu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gelu))
    code, _, err = command(capsys, *(word.replace("{empty}", str(tmp_path)) for word in words))
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert message in err


def test_an_empty_file_is_no_climb(tmp_path: Path) -> None:
    (tmp_path / "ladder.jsonl").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        report.read(tmp_path)
