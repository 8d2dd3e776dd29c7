"""The benchmark: what is measured, how it is judged and timed, and what becomes of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SMALL
from warpline.bench import charts, compare, methods, plan, report
from warpline.bench.methods.base import Method
from warpline.bench.methods.names import METHODS
from warpline.bench.methods.ours import Naive, OnTorch
from warpline.bench.oracle import Oracle
from warpline.bench.page import page
from warpline.bench.process import measure_process
from warpline.bench.protocol import Sample, collect, interleave
from warpline.bench.rows import SCHEMA
from warpline.bench.run import Bench
from warpline.bench.workloads import WORKLOADS, Case, Settings, cases
from warpline.cli.main import main
from warpline.errors import ConfigError
from warpline.model.weights import load

CPU = torch.device("cpu")


def case(**changes: Any) -> Case:
    usual: dict[str, Any] = {"workload": "reference", "kind": "generate", "model": SMALL, "dtype": "fp32", "new": 8}
    return Case(**usual | changes)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_workloads_are_the_named_ones() -> None:
    reference, long = WORKLOADS["reference"].shapes, WORKLOADS["long"].shapes
    assert (reference, long) == (((1, 16, 100),), ((1, 124, 900),))
    assert set(WORKLOADS) == {"reference", "decode", "long", "prefill", "batch", "coldstart", "memory"}


def test_sweep_is_the_product() -> None:
    found = cases(["reference", "batch"], models=["a", "b"], dtypes=["fp32", "fp16"], new=[5, 6], windows=[None, 4])
    assert len(found) == (1 + 3) * 2 * 2 * 2 * 2
    assert len(set(found)) == len(found)
    assert {c.batch for c in found} == {1, 8, 64, 256}
    one = cases(["decode"], models=["a"], dtypes=["fp32"], prompts=[7])
    assert [c.prompt for c in one] == [7]  # the five depths became one
    assert cases(["prefill"], models=["a"], dtypes=["fp32"], new=[9])[0].new == 0


def test_bad_sweeps_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'reference'"):
        cases(["refrence"], models=["a"], dtypes=["fp32"])
    with pytest.raises(ConfigError, match="batch must be at least 1"):
        cases(["reference"], models=["a"], dtypes=["fp32"], batches=[0])


# --- who is measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_name_and_says_what_it_lacks(name: str) -> None:
    method = methods.find(name)
    assert method.title
    reason = method.obstacle(case(), CPU)
    assert (reason is None) == ("cpu" in method.devices)
    assert "no bf8" in str(method.obstacle(case(dtype="bf8"), torch.device(method.devices[0])))
    if not method.windows:
        assert "window" in str(method.obstacle(case(window=4), torch.device(method.devices[0])))


@pytest.mark.parametrize("name", ["naive", "torch", "hf-eager", "hf-sdpa", "static-kv"])
@pytest.mark.parametrize("batch", [1, 3])
def test_methods_agree_with_the_oracle_to_the_token(name: str, batch: int) -> None:
    weights, one = load(SMALL), case(batch=batch, prompt=9, new=12)
    prompts = torch.randint(weights.config.vocab_size, (batch, 9), generator=torch.Generator().manual_seed(batch))
    expected = Naive(weights, one, CPU).generate(prompts, 12)
    method = methods.find(name)(weights, one, CPU)
    assert torch.equal(method.generate(prompts, 12), expected)
    assert torch.equal(method.generate(prompts, 3), expected[:, :3])  # nothing of the last run is left


@pytest.mark.parametrize("name", ["torch", "static-kv"])
def test_windows_agree(name: str) -> None:
    weights, one = load(SMALL), case(prompt=9, new=12, window=5)
    prompts = torch.randint(weights.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(7))
    expected = Naive(weights, one, CPU).generate(prompts, 12)
    assert torch.equal(methods.find(name)(weights, one, CPU).generate(prompts, 12), expected)
    assert not torch.equal(Naive(weights, case(prompt=9, new=12), CPU).generate(prompts, 12), expected)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "silu", "tanh"])
def test_onnxruntime_knows_every_activation(activation: str) -> None:
    weights, one = load(f"{SMALL},activation_function={activation}"), case(new=12)
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    method = methods.find("onnxruntime")(weights, one, CPU)
    assert torch.equal(method.generate(prompts, 12), Naive(weights, one, CPU).generate(prompts, 12))
    method.close()


@pytest.mark.parametrize("name", ["ctranslate2", "onnxruntime"])
def test_other_engines_agree(name: str) -> None:
    model = "random:n_layer=2,n_head=2,n_embd=64,n_positions=64"
    weights, one = load(model), case(model=model, prompt=9, new=6)
    prompts = torch.randint(weights.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))
    method = methods.find(name)(weights, one, CPU)
    assert torch.equal(method.generate(prompts, 6), Naive(weights, one, CPU).generate(prompts, 6))
    method.close()


@pytest.mark.parametrize("name", ["torch", "hf-sdpa", "ctranslate2", "onnxruntime"])
def test_the_end_of_a_text_is_a_token_like_any_other(name: str) -> None:
    """A model that says it again and again goes on to the full length."""
    weights = load("random:n_layer=1,n_head=2,n_embd=64,n_positions=64")
    end = weights.config.eos_token_id
    weights.tensors["wte.weight"][end] += 10 * weights.tensors["ln_f.bias"]
    weights.tensors["ln_f.bias"].mul_(50)
    prompts = torch.arange(1, 10)[None]
    expected = Naive(weights, case(), CPU).generate(prompts, 12)
    assert end in expected[0, :-1].tolist()
    method = methods.find(name)(weights, case(prompt=9, new=12), CPU)
    assert torch.equal(method.generate(prompts, 12), expected)
    method.close()


# --- how it is judged and timed ---------------------------------------------------------------------------------------


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


def test_methods_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda n=name: order.append(n)) for name in "abc"}
    samples = collect(interleave(calls, CPU, repetitions=4, budget_seconds=100))
    assert "".join(order) == "abccbaabccba"
    assert {name: len(sample.seconds) for name, sample in samples.items()} == dict.fromkeys("abc", 4)


def test_budget_ends_rounds_but_not_before_three() -> None:
    order: list[str] = []
    list(interleave({"a": lambda: order.append("a")}, CPU, repetitions=50, budget_seconds=0))
    assert len(order) == 3


def test_sample() -> None:
    sample = Sample((3.0, 1.0, 2.0, 4.0, 100.0))
    assert (sample.median, sample.percentile(0.2), sample.percentile(0.8), sample.mean) == (3, 2, 100, 22)
    assert Sample((1.0,)).sigma == 0


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    bench = Bench(Settings("cpu", repetitions=3, budget_seconds=5))
    bench.prepare()
    wanted = [case(prompt=p, new=8, workload="decode", kind="decode") for p in (4, 20)]
    wanted += [case(workload="prefill", kind="prefill", prompt=16, new=0), case(prompt=4000)]
    ticks: list[float] = []
    found = list(bench.run(wanted, ["torch", "naive", "static-kv", "static-kv-graph"], ticks.append))
    assert sum(ticks) == 4 * 4
    return [row for case_rows in found for row in case_rows]


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

    chosen: dict[str, type[Method]] = {"naive": Naive, "torch": Liar, "hf-sdpa": Broken}
    monkeypatch.setattr(methods, "find", chosen.__getitem__)
    bench = Bench(Settings("cpu", repetitions=3))
    (rows,) = bench.run([case()], list(chosen), lambda _: None)
    found = {row["method"]: row for row in rows}
    assert [row["status"] for row in found.values()] == ["ok", "wrong", "failed"]
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
    assert plan.share(100, [10, 10]) == 10 + 80 / 2  # enough for all, and what is left over is divided
    assert plan.share(100, [90, 90]) == 50
    assert plan.share(100, [90, 10, 10]) == 80  # those that need less leave it to the others
    assert plan.share(100, [10, 90, 90]) == 10
    assert plan.share(0, [5]) == 0


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=12), st.floats(0, 1e4))
def test_shares_never_exceed_the_time(needs: list[float], seconds: float) -> None:
    shares = [plan.share(seconds, [needs[i], *needs[:i], *needs[i + 1 :]]) for i in range(len(needs))]
    assert sum(shares) <= seconds * (1 + 1e-9)


def test_at_best_is_the_limit() -> None:
    config = load("stories").config
    decode = plan.seconds_at_best(case(model="stories", prompt=1, new=101), config, 10.0, 1e9)
    assert decode == pytest.approx(101 * 77.3e6 / 10e9, rel=0.05)  # 77 MB a token at 10 GB/s
    prefill = plan.seconds_at_best(case(model="stories", kind="prefill", prompt=256, new=0), config, 1e9, 0.1)
    assert 0.01 < prefill < 0.1
    assert plan.need(case(kind="coldstart"), 1.0, [1.0, 1.0]) == 2 * plan.need(case(kind="memory"), 1.0, [1.0, 1.0])


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


def test_process_that_fails_says_why() -> None:
    row = measure_process("torch", case(model="random:nothing", kind="memory"), CPU)
    assert row["status"] == "failed"
    assert "unknown model" in row["why"]


# --- what becomes of the rows -----------------------------------------------------------------------------------------


def test_report(rows: list[dict[str, Any]]) -> None:
    text = report.markdown(rows)
    assert "| naive |" in text
    assert "static-kv-graph (missing: runs on cuda only)" in text
    assert text.count("**decode") == 2
    table = report.table(rows[:4])
    assert table[0][3] == ""  # the baseline is not compared with itself
    assert table[1][3].endswith("%")
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


# --- the command ------------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out, printed.err


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["-m", SMALL, "--method", "naive,torch", "--new", "8", "--repetitions", "3", "--device", "cpu"]
    files = ["--csv", str(tmp_path / "a.csv"), "--md", str(tmp_path / "a.md"), "--html", str(tmp_path / "a.html")]
    code, out, _ = command(capsys, *options, *files, "--save", str(tmp_path))
    assert code == 0
    assert "so at best" in out
    last = json.loads(out.splitlines()[-1])
    assert last["rows"] == 2
    assert last["best"][0]["method"] in ("naive", "torch")
    (saved,) = tmp_path.rglob("bench.jsonl")
    code, out, _ = command(capsys, "compare", str(saved), str(saved))
    assert code == 0
    assert "same" in out
    code, out, _ = command(capsys, *options, "--json")
    assert len(json.loads(out)["rows"]) == 2


def test_interrupt_keeps_what_is_finished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = Bench._case

    def one(self: Bench, case: Case, *rest: Any) -> Any:
        if case.new == 6:
            raise KeyboardInterrupt
        return measured(self, case, *rest)

    monkeypatch.setattr(Bench, "_case", one)
    options = ["-m", SMALL, "--method", "naive", "--repetitions", "3", "--device", "cpu", "--save", str(tmp_path)]
    code, out, err = command(capsys, *options, "--new", "5,6,7")
    assert code == 130
    assert "stopped" in err
    assert json.loads(out.splitlines()[-1])["rows"] == 1
    (saved,) = tmp_path.rglob("bench.jsonl")
    assert [json.loads(line)["new"] for line in saved.read_text().splitlines()] == [5]
    assert command(capsys, *options, "--new", "6")[0] == 130


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["refrence"], "did you mean 'reference'"),
        (["--method", "torhc"], "did you mean 'torch'"),
        (["--dtype", "fp61"], "did you mean 'fp16'"),
        (["--batch", "two"], "--batch takes whole numbers"),
        (["-m", "random:nothing", "--device", "cpu"], "unknown model"),
        (["--prompt", "5000", "--device", "cpu", "--method", "torch"], "nothing could be measured"),
        (["compare", "a"], "two results are compared"),
        (["compare", "/none/a", "/none/b"], "cannot read"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = command(capsys, *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
