"""How methods are judged, timed and given their time."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.conftest import CPU, case
from tests.conftest import SMALL
from warpline.bench import budget, methods, process, protocol, run
from warpline.bench.methods.base import Method
from warpline.bench.methods.ours import Naive, OnTorch
from warpline.bench.oracle import Oracle
from warpline.bench.process import measure_process
from warpline.bench.protocol import Sample, collect, interleave
from warpline.bench.run import Bench, Row
from warpline.bench.workloads import Settings
from warpline.errors import ConfigError
from warpline.model.weights import load


def test_oracle_tells_right_from_wrong() -> None:
    weights = load(SMALL)
    oracle, prompts = Oracle(weights), torch.arange(1, 9)[None]
    tokens = Naive(weights, case(), CPU).generate(prompts, 10)
    verdict = oracle.judge(prompts, tokens, "fp32")
    assert verdict.right
    assert verdict.agreeing == 1
    tokens = torch.cat((tokens[:, :4], (tokens[:, 4:5] + 1) % weights.config.vocab_size, tokens[:, 5:]), dim=1)
    assert not oracle.judge(prompts, tokens, "fp32").right
    assert not oracle.judge(prompts, tokens, "bf16").right


def test_methods_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SHORT", 0.0)
    order: list[str] = []
    calls = {name: (lambda n=name: order.append(n)) for name in "abc"}
    samples = collect(interleave(calls, CPU, repetitions=4, budget_seconds=100))
    assert "".join(order) == "abccbaabccba"
    assert {name: len(sample.seconds) for name, sample in samples.items()} == dict.fromkeys("abc", 4)


def test_short_calls_are_made_twice_in_a_turn_and_timed_once() -> None:
    order: list[str] = []

    def long() -> None:
        order.append("l")
        time.sleep(0.12)

    calls = {"short": lambda: order.append("s"), "long": long}
    samples = collect(interleave(calls, CPU, repetitions=3, budget_seconds=100))
    assert "".join(order) == "sllssssl"
    assert {name: len(sample.seconds) for name, sample in samples.items()} == {"short": 3, "long": 3}


def test_a_turn_begins_when_threads_of_the_one_before_sleep() -> None:
    """Threads of libraries keep looking for work; the next method would share a core with them."""
    threads: list[threading.Thread] = []
    spinning: list[bool] = []

    def spin() -> None:
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            sum(range(1000))

    def restless() -> None:
        threads.append(threading.Thread(target=spin))
        threads[-1].start()
        time.sleep(0.001)

    calls = {"a": restless, "b": lambda: spinning.append(any(thread.is_alive() for thread in threads))}
    collect(interleave(calls, CPU, repetitions=3, budget_seconds=100))
    assert spinning
    assert not any(spinning)


def test_budget_ends_rounds_but_not_before_three() -> None:
    found = list(interleave({"a": lambda: None}, CPU, repetitions=50, budget_seconds=0))
    assert len(found) == 3


def test_sample() -> None:
    sample = Sample((3.0, 1.0, 2.0, 4.0, 100.0))
    assert (sample.median, sample.percentile(0.2), sample.percentile(0.8), sample.mean) == (3, 2, 100, 22)
    assert Sample((1.0,)).sigma == 0


def test_rows_are_whole(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 4 * 4
    assert [row["method"] for row in rows[:4]] == ["naive", "torch", "static-kv", "static-kv-graph"]
    for row in rows[:3]:
        assert row["status"] == "ok"
        assert row["seconds_p20"] <= row["seconds"] <= row["seconds_p80"]
        assert row["us_per_token"] > 0
        assert 0 < row["percent_of_limit"] < 120
        assert row["agreeing"] == 1
        assert len(row["source"]) == 16
        assert row["read_gb_s"] > 0
    assert rows[3]["status"] == "missing"
    assert "tflop_s" in rows[8]
    assert [row["status"] for row in rows[12:]] == ["impossible", "impossible", "impossible", "missing"]


def test_wrong_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(Naive):
        def generate(self, prompts: torch.Tensor, new: int) -> torch.Tensor:
            return (super().generate(prompts, new) + 1) % self.weights.config.vocab_size

    class Broken(Naive):
        def generate(self, prompts: torch.Tensor, new: int) -> torch.Tensor:
            raise RuntimeError("no luck\nat all")

    class Refused(Naive):
        def generate(self, prompts: torch.Tensor, new: int) -> torch.Tensor:
            raise ConfigError("up to 8 sequences, not 64")

    chosen: dict[str, type[Method]] = {"naive": Naive, "torch": Liar, "hf-sdpa": Broken, "static-kv": Refused}
    monkeypatch.setattr(methods, "find", chosen.__getitem__)
    bench = Bench(Settings("cpu", repetitions=3))
    (rows,) = bench.run([case()], list(chosen), lambda _: None)
    found = {row["method"]: row for row in rows}
    assert [row["status"] for row in found.values()] == ["ok", "wrong", "failed", "impossible"]
    assert found["static-kv"]["why"] == "up to 8 sequences, not 64"
    assert "seconds" not in found["torch"]
    assert found["hf-sdpa"]["why"] == "RuntimeError: no luck"


def test_patience() -> None:
    bench = Bench(Settings("cpu", repetitions=3, patience_seconds=1e-6))
    ((row,),) = bench.run([case()], ["naive"], lambda _: None)
    assert row["status"] == "skipped"
    assert "--patience" in row["why"]


def test_time_that_is_up() -> None:
    bench = Bench(Settings("cpu", limit_seconds=0))
    found = [
        row for rows in bench.run([case(), case(kind="memory")], ["naive", "torch"], lambda _: None) for row in rows
    ]
    assert {row["status"] for row in found} == {"skipped"}
    assert all("--minutes" in row["why"] for row in found)


def test_shares_of_time() -> None:
    def free(*needs: float) -> list[tuple[float, float]]:
        return [(0.0, need) for need in needs]

    assert budget.share(100, free(10, 10)) == 10 + 80 / 2  # enough for all, and what is left over is divided
    assert budget.share(100, free(90, 90)) == 50
    assert budget.share(100, free(90, 10, 10)) == 80  # cases that need less leave it to the others
    assert budget.share(100, free(10, 90, 90)) == 10
    assert budget.share(0, free(5)) == 0
    assert budget.share(100, [(10, 90), (60, 90)]) == 10 + 15  # the least that the other case needs is kept
    assert budget.share(50, [(10, 90), (60, 90)]) == 10


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 1e4)), min_size=1, max_size=12), st.floats(0, 1e4))
def test_shares_never_exceed_the_time(found: list[tuple[float, float]], seconds: float) -> None:
    needs = [(least, least + more) for least, more in found]
    shares = [budget.share(seconds, [needs[i], *needs[:i], *needs[i + 1 :]]) for i in range(len(needs))]
    assert sum(shares) <= max(seconds, sum(least for least, _ in needs)) * (1 + 1e-9)


def test_at_best_is_the_limit() -> None:
    config = load("stories").config
    decode = budget.seconds_at_best(case(model="stories", prompt=1, new=101), config, 10.0, 1e9)
    moved = 77.3e6 - config.vocab_size * (3 * config.n_embd - 12)  # a quarter of the LM head's bytes is read
    assert decode == pytest.approx((77.3e6 + 100 * moved) / 10e9, rel=0.05)  # at 10 GB/s
    prefill = budget.seconds_at_best(case(model="stories", kind="prefill", prompt=256, new=0), config, 1e9, 0.1)
    assert 0.01 < prefill < 0.1
    (cold, _), (memory, both) = (budget.need(case(kind=kind), 1.0, [1.0, 1.0]) for kind in ("coldstart", "memory"))
    assert cold == 2 * memory == both
    assert budget.need(case(), 1.0, []) == (0, 0)


@pytest.mark.parametrize("model", ["random:gpt2", "random:gpt2-xl"])
def test_a_gpu_reads_the_models_bytes_or_many_whichever_is_faster(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    asked: list[int] = []

    def read(megabytes: int) -> float:
        asked.append(megabytes)
        return (
            4000.0 if megabytes > 1000 else 9000.0 if megabytes < 100 else 3500.0
        )  # a cache, a short read, a long one

    monkeypatch.setattr(run, "read_bandwidth", read)
    monkeypatch.setattr(run, "product_rate", lambda _: 500.0)
    found = Bench(Settings("cuda")).limits(case(model=model, dtype="fp16"))
    assert found == {"read_gb_s": 4000.0, "product_tflop_s": 500.0}
    assert sorted(asked) == ([248, 1024] if model == "random:gpt2" else [1024])
    assert Bench(Settings("cuda")).limits(case(model="stories", dtype="fp16"))["read_gb_s"] == 9000.0


def test_hurry_leaves_out_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Naive):
        startup_seconds = 1e6

    chosen: dict[str, type[Method]] = {"torch": OnTorch, "naive": Slow}
    monkeypatch.setattr(methods, "find", chosen.__getitem__)
    bench = Bench(Settings("cpu", repetitions=3, limit_seconds=30))
    ((naive, ours),) = bench.run([case()], list(chosen), lambda _: None)
    assert (ours["status"], naive["status"]) == ("ok", "skipped")


def test_too_large_is_said_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpline.hardware.free_bytes", lambda _: 1000)
    monkeypatch.setattr(Bench, "load", lambda *_: pytest.fail("it was loaded"))
    bench = Bench(Settings("cpu"))
    ((row,),) = bench.run([case(model="random:gpt2")], ["torch"], lambda _: None)
    assert row["status"] == "impossible"
    assert "more than are free" in row["why"]


@pytest.mark.parametrize("kind", ["coldstart", "memory"])
def test_process(kind: str) -> None:
    row = measure_process("torch", case(workload=kind, kind=kind), CPU)
    assert row["status"] == "ok", row
    if kind == "memory":
        assert 50e6 < row["peak_bytes"] < 5e9
    else:
        assert 0 < row["warm_seconds"] < 120


def test_a_start_without_bytecode_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_start", lambda *_: {"seconds": 1.0})
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    row = measure_process("torch", case(kind="coldstart"), CPU)
    assert row == {"status": "ok", "cold_seconds": 1.0, "warm_seconds": 1.0, "bytecode": False}
    assert "PYTHONPYCACHEPREFIX" in caplog.text
    compiled = Path(importlib.util.cache_from_source(torch.__file__))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert measure_process("torch", case(kind="coldstart"), CPU)["bytecode"]


def test_process_that_fails_says_why() -> None:
    row = measure_process("torch", case(model="random:nothing", kind="memory"), CPU)
    assert row["status"] == "failed"
    assert "unknown model" in row["why"]


def test_a_window_moves_fewer_bytes() -> None:
    bench = Bench(Settings("cpu", repetitions=3))
    rows: list[Row] = [{}]
    while not all("gb_s" in row for row in rows):  # left out where noise exceeds the measurement
        cases = [case(batch=16, prompt=60, window=w) for w in (None, 4)]
        rows = [row for (row,) in bench.run(cases, ["torch"], lambda _: None)]
    moved = [row["gb_s"] * row["us_per_token"] for row in rows]
    assert moved[1] < 0.97 * moved[0]
