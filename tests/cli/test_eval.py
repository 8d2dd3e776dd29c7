"""`warpline eval`: what dtypes cost on a text, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_dtypes_side_by_side(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little frog who wanted to sing.")
    code, out, err = run("eval", "stories", "--dtype", "fp32,int8", "--text", str(text), "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    plain, small = json.loads(out)["rows"]
    assert plain["kl_nats"] == 0
    assert plain["top1_agreement"] == 1
    assert 0 < small["kl_nats"] < 0.01
    assert abs(small["perplexity"] / plain["perplexity"] - 1) < 0.03


def test_codes_beside_every_dtype(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little frog who wanted to sing.")
    arguments = ("--dtype", "fp32,bf16", "--kv-dtype", "int8", "--executor", "torch", "--device", "cpu")
    code, out, err = run("eval", "stories", *arguments, "--text", str(text), "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["rows"]
    assert [row["dtype"] for row in rows] == ["fp32", "fp32, int8 KV", "bf16", "bf16, int8 KV"]
    assert 0 < rows[1]["kl_nats"] < 0.01
    assert abs(rows[1]["perplexity"] / rows[0]["perplexity"] - 1) < 0.03


def test_bad_input_gets_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" ")
    for arguments, said in (
        (("--dtype", "int4"), "unknown dtype 'int4'"),
        (("--kv-dtype", "int4"), "unknown kv_dtype 'int4'"),
        (("--kv-dtype", "int8", "--device", "cpu"), "the cpu executor has no kv_dtype='int8'"),
        (("--text", str(tmp_path / "none.txt")), "cannot read"),
        (("--text", str(tmp_path / "empty.txt")), "is empty"),
    ):
        code, out, err = run("eval", "stories", *arguments)
        assert (code, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1
