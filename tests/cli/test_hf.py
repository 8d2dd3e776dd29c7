"""`warpline hf`."""

from __future__ import annotations

import json

from tests.cli.conftest import Run
from tests.conftest import SMALL

QUICK = ("--new", "8", "--prompt", "4", "--repetitions", "1", "--budget", "0")


def test_what_is_patched_and_what_it_gains(run: Run) -> None:
    code, out, err = run("hf", SMALL, *QUICK)
    assert (code, err) == (0, "")
    for part in ("replaced  mlp", "replaced  generate", "logits moved", "100.0 % of the generated", "tok/s"):
        assert part in out
    for way in ("unpatched", "kernels only", "patched", "our engine alone"):
        assert way in out


def test_json(run: Run) -> None:
    code, out, _ = run("hf", SMALL, *QUICK, "--json", "--batch", "2", "--fast-math")
    assert code == 0
    found = json.loads(out)
    assert found["difference"] <= found["allowed"]
    assert found["same_tokens"] == 1
    assert found["fast_math_difference"] is not None
    assert [row["way"] for row in found["rows"] if row["what"] == "generate 2 × (4 + 8)"] == [
        "unpatched", "kernels only", "patched", "our engine alone",
    ]  # fmt: skip
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])


def test_what_does_not_fit_is_refused(run: Run) -> None:
    code, out, err = run("hf", SMALL, "--new", "1000")
    assert (code, out) == (2, "")
    assert "do not fit into the context of 96" in err
    assert run("hf", "nonsense")[0] == 2
