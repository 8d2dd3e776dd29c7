"""Many requests at once: their lengths, the padding of methods that need it, and what the rows say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.conftest import CPU, case
from tests.conftest import SMALL
from warpline.bench import budget, methods, report, throughput
from warpline.bench.lengths import LEAST
from warpline.bench.methods import static_kv
from warpline.bench.methods.base import Counts, Method
from warpline.bench.methods.ours import Naive, OnLLM
from warpline.bench.methods.static_kv import StaticKV, StaticKVCompiled
from warpline.bench.oracle import Oracle
from warpline.bench.protocol import Sample
from warpline.bench.requests import MOST, MULTIPLE, Asked, batches, lengths, requests
from warpline.bench.run import Bench
from warpline.bench.workloads import Case, Settings
from warpline.config import ModelConfig
from warpline.model.weights import load, read_config


def many(**changes: Any) -> Case:
    usual: dict[str, Any] = {"workload": "throughput", "kind": "throughput", "batch": 12, "prompt": 14, "new": 10}
    return case(**usual | changes)


class Padded(StaticKV):
    """The static KV cache without torch.compile, which would take too long in a test."""

    serves = "padded"


def test_lengths_are_as_long_as_the_case_says() -> None:
    one = many(batch=1024, prompt=225, new=202)
    found = lengths(one, 1024)
    assert len(found) == 1024
    prompts, outputs = zip(*found, strict=True)
    assert statistics.fmean(prompts) == pytest.approx(225, rel=0.08)
    assert statistics.fmean(outputs) == pytest.approx(202, rel=0.08)  # some are cut at the context
    assert min(prompts) >= LEAST <= min(outputs)
    assert max(map(sum, found)) <= MOST
    assert statistics.stdev(outputs) > 100  # a batch has to wait for its longest
    lengths.cache_clear()
    assert lengths(one, 1024) == found


def test_lengths_fit_the_model() -> None:
    assert max(map(sum, lengths(many(batch=500, prompt=60, new=30), 96))) == 96
    config = read_config(SMALL)
    asked = requests(many(), config)
    assert [(len(one.prompt), one.new) for one in asked] == list(lengths(many(), config.n_positions))
    assert all(0 <= token < config.vocab_size for one in asked for token in one.prompt)
    assert requests(many(), config) == asked


def test_padding() -> None:
    asked = [Asked((1,) * 5, 3), Asked((2,) * 70, 9), Asked((3,) * 4, 30)]
    first, second = batches(asked, 2, 100, ragged=False, fixed=False)
    assert (first.new, second.new) == (9, 30)
    assert first.rectangle.shape == (2, 70)
    assert first.prompts[0] == (0,) * 65 + (1,) * 5
    assert second.rectangle.shape == (1, 4)
    first, second = batches(asked, 2, 200, ragged=False, fixed=True)
    assert first.rectangle.shape == (2, 2 * MULTIPLE)
    assert second.rectangle.shape == (2, MULTIPLE)  # the batch's full number of rows
    assert len(second.asked) == 1
    first, _ = batches(asked, 2, 100, ragged=False, fixed=True)
    assert first.rectangle.shape == (2, 91)  # short enough to leave room for the output
    alone, *_ = batches(asked, 2, 75, ragged=True, fixed=False)
    assert [len(prompt) for prompt in alone.prompts] == [5]  # with the next one, 70 + 9 would exceed the context


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)).filter(lambda both: sum(both) <= 100), min_size=1))
def test_every_request_is_in_a_batch_that_has_room_for_all_of_it(both: list[tuple[int, int]]) -> None:
    asked = [Asked((1,) * prompt, new) for prompt, new in both]
    for ragged, fixed in ((False, False), (False, True), (True, False)):
        made = list(batches(asked, 4, 100, ragged=ragged, fixed=fixed))
        assert [one for batch in made for one in batch.asked] == asked
        for batch in made:
            assert len(batch.asked) <= 4
            assert all(one.new <= batch.new for one in batch.asked)
            assert max(map(len, batch.prompts)) + batch.new <= 100
            if not ragged:
                assert all(
                    row[-len(one.prompt) :] == one.prompt for row, one in zip(batch.prompts, batch.asked, strict=False)
                )


def test_a_padded_method_knows_its_longest_batch() -> None:
    asked = [Asked((1,) * 60, 4), Asked((1,) * 8, 50), Asked((1,) * 30, 30)]
    config = ModelConfig(n_positions=96)
    one = throughput.sized(many(), config, methods.find("hf-sdpa"), asked, 1)
    assert (one.batch, one.prompt, one.new) == (1, 60, 50)
    one = throughput.sized(many(), config, methods.find("hf-sdpa"), asked, 3)
    assert (one.batch, one.prompt, one.new) == (3, 60, 50)


def test_at_best_however_many_share_a_step() -> None:
    config, one = ModelConfig(), many(batch=64, prompt=225, new=202, dtype="fp16")
    outputs, rows = sum(new for _, new in lengths(one, 1024)), sum(map(sum, lengths(one, 1024)))
    arithmetic = budget.seconds_at_best(one, config, 1e9, 1.0)  # memory is not the limit
    blocks, head = 2 * 12 * 12 * 768**2, 2 * 768 * 50257
    assert arithmetic == pytest.approx((rows * blocks + outputs * head) / 1e12, rel=0.02)
    memory = budget.seconds_at_best(one, config, 1.0, 1e9)
    read = sum(position for prompt, new in lengths(one, 1024) for position in range(prompt, prompt + new - 1))
    assert memory == pytest.approx((read * 12 * 2 * 768 * 2 + 2 * 124.4e6) / 1e9, rel=0.01)


@pytest.mark.parametrize("kind", [OnLLM, Padded, methods.find("hf-sdpa")])
def test_methods_serve_what_is_wanted(kind: type[Method]) -> None:
    weights, one = load(SMALL), many()
    asked = requests(one, weights.config)
    served = throughput.best(kind, weights, one, CPU, asked, 60)
    assert served is not None
    assert [len(tokens) for tokens in served.tokens] == [one.new for one in served.asked]
    assert sorted(served.asked) == sorted(asked)
    verdict = throughput.judge(served, Oracle(weights), "fp32")
    assert verdict.right
    assert verdict.agreeing == 1
    spoilt = [[(token + 1) % 50257 for token in tokens] for tokens in served.tokens]
    served.tokens = spoilt
    assert not throughput.judge(served, Oracle(weights), "fp32").right
    served.method.close()


def test_padding_does_not_change_what_a_ragged_method_says() -> None:
    model = "random:n_layer=2,n_head=2,n_embd=64,n_positions=64"
    weights, one = load(model), many(model=model, batch=5)
    asked = requests(one, weights.config)
    served = throughput.best(methods.find("ctranslate2"), weights, one, CPU, asked, 60)
    assert served is not None
    naive = Naive(weights, one, CPU)
    alone = [naive.generate(torch.tensor([one.prompt]), one.new)[0].tolist() for one in served.asked]
    assert served.tokens == alone
    served.method.close()


class Slow(Naive):
    """A method of known speed, which is fastest with four rows."""

    serves = "padded"
    made: list[tuple[int, str]] = []  # noqa: RUF012 - of the test

    def __init__(self, weights: Any, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        self.made.append((case.batch, "built"))

    def generate(self, prompts: torch.Tensor, new: int) -> torch.Tensor:
        time.sleep(1e-3 * new * (1 + abs(len(prompts) - 4)))
        return torch.zeros(len(prompts), new, dtype=torch.long)

    def close(self) -> None:
        self.made.append((self.case.batch, "closed"))
        super().close()


def test_the_best_size_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, one = load(SMALL), many(batch=16)
    asked = [Asked((1, 2, 3, 4), 5)] * 16
    monkeypatch.setitem(throughput.SIZES, "cpu", (8, 4, 2))
    Slow.made.clear()
    served = throughput.best(Slow, weights, one, CPU, asked, 60)
    assert served is not None
    assert served.size == 4
    assert Slow.made == [(8, "built"), (4, "built"), (8, "closed"), (2, "built"), (2, "closed")]
    assert throughput.best(Slow, weights, one, CPU, asked, 1e-4) is None


def test_a_size_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Slow):
        def __init__(self, weights: Any, case: Case, device: torch.device):
            if case.batch > 2:
                raise torch.OutOfMemoryError("no room")
            super().__init__(weights, case, device)

    monkeypatch.setitem(throughput.SIZES, "cpu", (8, 4, 2))
    weights, asked = load(SMALL), [Asked((1, 2, 3, 4), 5)] * 8
    served = throughput.best(Large, weights, many(), CPU, asked, 60)
    assert served is not None
    assert served.size == 2
    monkeypatch.setitem(throughput.SIZES, "cpu", (8, 4))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        throughput.best(Large, weights, many(), CPU, asked, 60)


def measured(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, type[Method]], **settings: Any) -> dict[str, Any]:
    found = methods.find
    monkeypatch.setattr(methods, "find", lambda name: chosen.get(name) or found(name))
    bench = Bench(Settings("cpu", **{"repetitions": 2} | settings))
    bench.prepare()
    ticks: list[float] = []
    (rows,) = bench.run([many()], list(chosen), ticks.append)
    assert sum(ticks) == len(chosen)
    return {row["method"]: row for row in rows}


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, type[Method]] = {"warpline": OnLLM, "static-kv-compile": Padded, "torch": methods.find("torch")}
    rows = measured(monkeypatch, chosen)
    ours, padded, absent = rows["warpline"], rows["static-kv-compile"], rows["torch"]
    assert next(iter(rows)) == "warpline"
    wanted = sum(one.new for one in requests(many(), read_config(SMALL)))
    for row in (ours, padded):
        assert row["status"] == "ok", row
        assert row["agreeing"] == 1
        assert 1 <= row["repetitions"] <= 2
        assert row["requests_per_second"] == pytest.approx(12 / row["seconds"], rel=1e-2)
        assert row["tokens_per_second"] == pytest.approx(wanted / row["seconds"], rel=1e-2)
        assert 0 < row["percent_of_limit"] < 100
    assert 1 < ours["mean_lanes"] <= 12
    assert 0 <= ours["idle_share"] < 1
    assert "padded_batch" not in ours
    assert padded["padded_batch"] in (8, 12)
    assert "mean_lanes" not in padded
    assert absent["status"] == "missing"
    assert "unequal lengths" in absent["why"]
    titles, *lines = report.columns(list(rows.values()))
    assert {"requests/s", "lanes", "idle"} <= set(titles)
    cells = dict(zip(titles, lines[1], strict=True))
    assert cells["lanes"] == f"{padded['padded_batch']} padded"
    assert cells["× peer"] == ""  # the fastest peer is what the others are compared with
    assert "requests_per_second" in report.as_csv(list(rows.values())).splitlines()[0]
    assert "12 requests of about 14 + 10 tokens" in report.markdown(list(rows.values()))


def test_what_goes_wrong_is_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Padded):
        def generate(self, prompts: torch.Tensor, new: int) -> torch.Tensor:
            raise RuntimeError("no luck\nat all")

    class Short(OnLLM):
        def serve(self, asked: Sequence[Asked], batch: int) -> Iterator[list[list[int]]]:
            for tokens in super().serve(asked, batch):
                yield [row[1:] for row in tokens]

    class Liar(Padded):
        def generate(self, prompts: torch.Tensor, new: int) -> torch.Tensor:
            return (super().generate(prompts, new) + 1) % 50257

    rows = measured(monkeypatch, {"warpline": Short, "hf-sdpa": Broken, "static-kv-compile": Liar})
    assert [row["status"] for row in rows.values()] == ["failed", "failed", "wrong"]
    assert "did not come" in rows["warpline"]["why"]
    assert rows["hf-sdpa"]["why"] == "RuntimeError: no luck"
    assert "seconds" not in rows["static-kv-compile"]


def test_patience_and_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, {"static-kv-compile": Slow}, patience_seconds=0.005)
    assert rows["static-kv-compile"]["status"] == "skipped"
    assert "--patience" in rows["static-kv-compile"]["why"]

    class Later(Padded):
        startup_seconds = 1e6

    rows = measured(monkeypatch, {"hf-sdpa": Padded, "static-kv-compile": Later}, limit_seconds=30)
    assert [row["status"] for row in rows.values()] == ["ok", "skipped"]


def test_without_time_for_repetitions_the_judged_run_counts() -> None:
    weights, seconds = load(SMALL), {"long": 100.0, "short": 0.1}
    served = {name: throughput.Served(Padded(weights, case(), CPU), [], 1, [], each) for name, each in seconds.items()}

    def timed(left: float) -> set[str]:
        return set(throughput._time(served, CPU, Settings("cpu"), budget.Deadline(time.monotonic() + left)))

    assert timed(5) == set()
    assert timed(1000) == {"short"}  # another run of the long one would take its whole part


def test_what_an_engine_says() -> None:
    before, after = Counts(10, 100, 1.0, 0.5), Counts(30, 300, 4.0, 1.5)
    assert throughput._engine(before, after) == {"mean_lanes": 10.0, "idle_share": 0.25}
    assert throughput._engine(None, Counts(2, 8, 1.0, 0.0)) == {"mean_lanes": 4.0, "idle_share": 0.0}
    assert throughput._engine(None, None) == {}


def test_figures_of_int8_count_its_bytes() -> None:
    config, limits, sample = read_config(SMALL), {"read_gb_s": 10.0, "product_tflop_s": 0.1}, Sample((2.0,))
    found = {name: throughput.figures(many(), config, name, sample, limits) for name in ("warpline", "warpline-int8")}
    assert found["warpline"]["requests_per_second"] == 6
    assert "percent_of_limit" in found["warpline-int8"]
    assert "percent_of_limit" not in throughput.figures(many(), config, "ctranslate2-int8", sample, limits)


def test_captured_steps_serve_prompts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs here just call what they have captured."""

    def captured(work: Callable[[], None], before: Callable[[], None]) -> Any:
        before()
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(static_kv._Graphs, "_captured", staticmethod(captured))
    weights = load(SMALL)
    for kind, sizes in (("throughput", (5, 20, 30)), ("generate", (30,))):
        one = many(kind=kind, batch=2, prompt=30, new=6)
        eager = StaticKV(weights, one, CPU)
        any_length = kind == "throughput"
        graphs = static_kv._Graphs(eager._likeliest, eager._likeliest, one, CPU, any_length=any_length)
        for length in sizes:
            prompts = torch.randint(50257, (2, length), generator=torch.Generator().manual_seed(length))
            marks: list[int] = []
            tokens = graphs.generate(prompts, 6, lambda marks=marks: marks.append(1)).clone()  # type: ignore[misc]
            assert torch.equal(tokens, StaticKV(weights, one, CPU).generate(prompts, 6))
            assert len(marks) == 6


@pytest.mark.skipif(StaticKVCompiled.missing() is not None, reason=str(StaticKVCompiled.missing()))
def test_compiled_code_serves_prompts_of_any_length() -> None:
    torch._dynamo.reset()
    weights, one = load("random:n_layer=1,n_head=2,n_embd=32,n_positions=96"), many(batch=6, prompt=30, new=4)
    asked = [Asked(tuple(range(1, 1 + length)), 4) for length in (5, 9, 20, 30, 70, 80)]
    method = StaticKVCompiled(weights, throughput.sized(one, weights.config, StaticKVCompiled, asked, 2), CPU)
    eager = StaticKV(weights, method.case, CPU)
    assert list(method.serve(asked, 2)) == list(eager.serve(asked, 2))
    method.close()
    torch._dynamo.reset()
