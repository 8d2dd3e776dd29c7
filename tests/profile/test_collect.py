"""Recording on a CPU: sums agree with an independent clock, and nothing remains afterwards."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import SMALL
from tests.profile.conftest import stages
from warpline.bench import methods
from warpline.bench.methods.base import Method
from warpline.bench.methods.static_kv import StaticKVCompiled
from warpline.engine.executors.graph import schedule
from warpline.engine.executors.graph.schedule import End, PassRules, decode_step
from warpline.errors import ConfigError
from warpline.model import observe
from warpline.model.weights import load
from warpline.profile import collect as recording
from warpline.profile import recorders, stamps, tree
from warpline.profile.classify import classes
from warpline.profile.collect import MOST_STEPS, ProfileRequest, collect
from warpline.profile.events import aggregate
from warpline.profile.instruments import placed, reason_against, sequencer_of, watched
from warpline.profile.names import BLOCKS, op_path
from warpline.profile.order import by_products
from warpline.profile.recorders import convert, timed_spans
from warpline.profile.session import Session, Work

CPU = torch.device("cpu")


def test_a_warning_of_some_versions_is_not_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    class Warns(torch.profiler.profile):
        def start(self) -> None:
            warnings.warn("Warning: Profiler clears events at the end of each cycle.", UserWarning, stacklevel=2)
            super().start()

    monkeypatch.setattr(recorders, "profile", Warns)
    assert collect(wanted("torch", phases=("decode",))).phases  # warnings are errors here


def wanted(method: str, **changes: Any) -> ProfileRequest:
    usual: dict[str, Any] = {"model": SMALL, "dtype": "fp32", "device": "cpu", "context": 12, "steps": 4}
    return ProfileRequest(method=method, **usual | changes)


def made(name: str, one: ProfileRequest) -> tuple[Method, Any]:
    """Return a method, and prompts in its form."""
    weights = load(SMALL)
    prompts = torch.randint(weights.config.vocab_size, (one.batch, one.context))
    method = methods.find(name)(weights, one.case, CPU)
    return method, method.given(prompts)


@pytest.mark.parametrize("name", ["naive", "torch", "hf-eager", "hf-sdpa", "static-kv"])
def test_modules_sum_to_the_step(name: str) -> None:
    session = collect(wanted(name, batch=2))
    assert [phase.name for phase in session.phases] == ["prefill", "decode"]
    for phase in session.phases:
        root = tree.build(phase)
        assert root.us == pytest.approx(phase.step_us, rel=0.02)
        assert sum(row.us for row in phase.kernels) == pytest.approx(phase.busy_us, rel=0.02)
        assert phase.steps == (4 if phase.name == "decode" else recording.PROMPTS)
        assert phase.fastest_us <= phase.step_us <= phase.slowest_us
        assert phase.plain_us > 0
        attention = root.find(BLOCKS, "attention")
        assert attention is not None
        assert {"QKV projection", "output projection"} <= set(attention.children)
        projections = [row for row in phase.spans if row.path[-1:] == ("QKV projection",)]
        assert len(projections) == 3
        if name == "static-kv":  # a model of plain functions, whose products tell the modules
            assert "graphs and compiled code are assigned to modules by the order of their products" in session.notes
        else:
            assert [row.calls for row in projections] == [1, 1, 1]
    assert session.phase("decode").work.naive == (name == "naive")
    known = 12 + 2 + 4 // 2  # context, steps that are not recorded, half of those that are
    whole = Work(known + 1, 0, known + 1, naive=True)  # with the newest token
    assert session.phase("decode").work == (whole if name == "naive" else Work(1, known, 1, naive=False))


@pytest.mark.alone
def test_recorded_steps_fill_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with the wall clock around the same generation."""
    one = wanted("torch", steps=37)
    method, prompts = made("torch", one)
    method.generate(prompts, one.case.new)
    passed: list[float] = []
    run = recorders._run

    def timed_run(*args: Any) -> None:
        start = time.perf_counter()
        run(*args)
        passed.append(1e6 * (time.perf_counter() - start))

    monkeypatch.setattr(recorders, "_run", timed_run)
    events = recorders.by_kineto(method, prompts, 40, 1)
    found = aggregate(events, expected=40, on_gpu=False)
    assert 0.95 * passed[0] < sum(found.steps) < 1.02 * passed[0]


@pytest.mark.skipif(StaticKVCompiled.missing() is not None, reason=str(StaticKVCompiled.missing()))
def test_loops_of_compiled_code_are_seen() -> None:
    phase = collect(wanted("static-kv-compile", phases=("decode",))).phases[0]
    loops = {row.path[-1]: row for row in phase.kernels if "cpp_fused" in row.name and row.path}
    assert {"ln_1", "ln_2", "ln_f", "activation"} <= set(loops)
    assert not any("Compiled" in row.name for row in phase.kernels)
    root = tree.build(phase)
    assert root.us == pytest.approx(phase.step_us, rel=0.02)
    assert root.find(BLOCKS, "MLP", "projection") is not None


@pytest.mark.parametrize("name", ["naive", "torch", "hf-sdpa", "static-kv", "cpu", "kernels"])
def test_nothing_stays_behind(name: str) -> None:
    one = wanted(name)
    method, prompts = made(name, one)
    expected = method.generate(prompts, 5).clone()
    marks: list[int] = []
    paths: list[tuple[str, ...]] = []

    class Entered:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def span(path: tuple[str, ...]) -> Any:
        paths.append(path)
        return Entered()

    with watched(method, lambda: marks.append(1), span):
        assert torch.equal(method.generate(prompts, 5), expected)
    assert len(marks) == 5
    seen = len(paths)
    assert seen or name in ("static-kv", "cpu", "kernels")
    assert observe._observer is None
    assert torch.equal(method.generate(prompts, 5), expected)
    assert (len(marks), len(paths)) == (5, seen)


def test_unwatched_model_enters_nothing() -> None:
    assert observe.during.__globals__["_observer"] is None
    assert observe.during(object(), 1) is observe._UNOBSERVED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": MOST_STEPS + 1}, "more than a profile keeps"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"context": 0}, "context must be at least 1"),
    ],
)
def test_bad_wishes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wanted("torch", **changes)


def test_what_cannot_be_profiled_says_why() -> None:
    with pytest.raises(ConfigError, match="positions are more than"):
        collect(wanted("torch", context=4000))
    with pytest.raises(ConfigError, match="runs on cuda only"):
        collect(wanted("graph"))
    assert "outside of torch" in str(reason_against(methods.find("ctranslate2")))
    assert "profile that executor" in str(reason_against(methods.find("warpline")))
    method, _ = made("warpline", wanted("warpline"))
    with pytest.raises(ConfigError, match="profile that executor"):
        watched(method, lambda: None, lambda _: pytest.fail("nothing is seen"))


def test_passes_over_one_prompt_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one = wanted("torch", batch=2)
    method, given = made("torch", one)
    monkeypatch.setattr(method._executor, "prompt_tokens", 7)  # type: ignore[attr-defined]
    marks: list[int] = []
    with watched(method, lambda: marks.append(1), lambda _: nullcontext()):
        for _ in range(2):
            method.generate(given, 3)
    assert len(marks) == 2 * 3


# --- the GPU's side, on made-up events --------------------------------------------------------------------------------


def kineto(name: str, start: float, us: float, **more: Any) -> Any:
    """Return one of kineto's events with the fields that are read, at `us` µs of a day in 2026."""
    usual = {"device": "CPU", "correlation": 0, "thread": 1, "user": False} | more
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: 1_794_777_572_039_074_789 + round(1000 * start),
        duration_ns=lambda: int(1000 * us),
        device_type=lambda: f"DeviceType.{usual['device']}",
        correlation_id=lambda: usual["correlation"],
        start_thread_id=lambda: usual["thread"],
        is_user_annotation=lambda: usual["user"],
    )


def test_kinetos_events_become_ours() -> None:
    raw = [
        kineto("warpline mark", 100, 0.1, user=True),
        kineto("warpline|h.0/attention/scores", 102, 20, user=True),
        kineto("warpline|h.0/attention/scores", 130, 20, user=True, device="CUDA"),  # its copy on the GPU's track
        kineto("aten::bmm", 104, 10),
        kineto("aten::bmm", 104, 10, thread=9),
        kineto("cudaLaunchKernel", 106, 4, correlation=7),
        kineto("cudaStreamSynchronize", 112, 4),
        kineto("TorchDynamo Cache Lookup", 118, 4),
        kineto("gemm", 130.033, 20, correlation=7, device="CUDA"),
        kineto("warpline mark end", 160, 0.1, user=True),
    ]
    events = convert(raw)
    assert [(e.kind, e.name, e.start) for e in events] == [
        ("mark", "warpline mark", 0),
        ("span", "warpline|h.0/attention/scores", 2),
        ("op", "aten::bmm", 4),
        ("launch", "cudaLaunchKernel", 6),
        ("kernel", "gemm", 30.033),  # to the nanosecond, which a float of the time since 1970 does not resolve
        ("end", "warpline mark end", 60),
    ]
    found = aggregate(events, expected=1, on_gpu=True)
    assert [row.path for row in found.kernels] == [("h.0", "attention", "scores")]


def test_events_in_place_of_cupti() -> None:
    taken = [
        ("mark", (), 0.0, 0.0),
        ("kernel", ("h.0",), 1.0, 11.0),
        ("kernel", ("h.0", "ln_1"), 2.0, 5.0),
        ("kernel", ("h.0", "MLP"), 6.0, 10.0),
        ("mark", (), 20.0, 20.0),
        ("end", (), 30.0, 30.0),
    ]
    found = aggregate(timed_spans(taken), expected=2, on_gpu=True)
    assert found.steps == (10, 20)
    rows = {row.path: (2 * row.busy_us, 2 * row.gap_us) for row in found.spans}
    assert rows["h.0", "ln_1"] == (3, 2)
    assert rows["h.0", "MLP"] == (4, 1)
    assert rows["[step]",] == (10, 10)  # a step without recorded modules


def test_cupti_missing_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    one = wanted("torch")
    method, prompts = made("torch", one)
    method.generate(prompts, one.case.new)

    def blind(*_: Any) -> Any:
        raise recorders.CuptiMissingError("torch.profiler sees nothing of this GPU")

    real = recorders.by_kineto
    monkeypatch.setattr(recorders, "by_kineto", blind)
    monkeypatch.setattr(recorders, "by_events", real)
    recorder = recording._Recorder(method, prompts, one)
    phase = recorder.phase("decode")
    assert phase.source == "events"
    assert "modules are timed by events" in recorder.notes[0]
    assert not phase.kernels


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize(("batch", "whole"), [(1, True), (64, False), (64, True)])
def test_kernels_are_placed_by_the_schedule(
    batch: int, whole: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "suits", lambda *_, **__: whole)  # as on a GPU that can, or cannot
    weights = load(SMALL, dtype=dtype)
    steps = decode_step(PassRules(weights), batch, End.LIKELIEST)
    ops = [(s.op, op_path(s.op, s.inputs, s.layer)) for s in steps]
    names = [f"warpline_{step.op}" for step in steps]
    found = placed(names, ops)
    assert found == [path for _, path in ops]
    for step, path in zip(steps, found, strict=True):
        assert path is not None
        assert step.layer is None or path[0] == f"h.{step.layer}", (step.op, path)
    priced = {name for _, path in ops for name in path[-1].split(" + ")}
    assert {"embedding", "QKV projection", "KV cache", "fused attention", "expansion", "projection"} <= priced
    assert {"residual 1", "residual 2", "ln_1", "ln_2", "activation", "output projection", "LM head"} <= priced


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_tables_of_an_executor_that_ran(batch: int, phase: str) -> None:
    """The kernels executor runs its table on a CPU too, by references; the names of kernels are made up here."""
    one = wanted("kernels", batch=batch)
    method, prompts = made("kernels", one)
    marks: list[int] = []
    with watched(method, lambda: marks.append(1), lambda _: pytest.fail("there are no spans")):
        method.generate(prompts, 3)
    assert len(marks) == 3
    table = method.table(phase)
    assert table is not None
    ops = [step.op for step in table]
    sequencer = sequencer_of(method, phase)
    assert sequencer is not None
    found = [path for path in sequencer([f"warpline_{op}" for op in ops]) if path is not None]
    assert len(found) == len(ops)
    for layer in range(3):
        mine = {path[1:] for path in found if path[0] == f"h.{layer}"}
        products = {name for path in mine for name in path[-1].split(" + ")}
        assert {"QKV projection", "fused attention", "output projection", "expansion", "projection"} <= products
        assert {path[0] for path in mine} >= {"attention", "MLP"}
    assert any("LM head" in path[-1] for path in found)


def test_a_librarys_kernels_belong_to_the_ops_between_ours() -> None:
    ops = [("layernorm", ("a",)), ("matmul_bias_gelu", ("b",)), ("matmul_bias", ("c",)), ("residual_layernorm", ("d",))]
    names = ["warpline_layernorm", "sm90_xmma_gemm", "gelu_kernel", "nvjet_hsh_64x8", "splitKreduce_kernel"]
    names.append("warpline_residual_layernorm")
    assert placed(names, ops) == [("a",), ("b",), ("b",), ("c",), ("c",), ("d",)]
    assert placed([names[0], "strange", names[-1]], ops) == [("a",), None, ("d",)]
    assert placed(["warpline_unheard_of"], ops) == [None]


def test_a_graph_without_a_table_is_placed_by_its_products() -> None:
    block = ["triton_red_fused_add_layer_norm_1", "gemv2T_qkv", "index_put", "fmha_cutlassF", "gemm_out"]
    block += ["triton_red_fused_add_layer_norm_2", "gemm_fc", "triton_poi_fused_gelu", "gemm_proj", "splitKreduce"]
    names = ["triton_poi_fused_embedding", *block, *block, "triton_red_fused_ln_f", "gemm_head", "argmax_reduce"]
    found = by_products(names, 2)
    first = ("h.0", "attention")
    assert found[:6] == [
        ("embedding",), ("h.0", "ln_1"), (*first, "QKV projection"), (*first, "KV cache"), (*first, "fused attention"),
        (*first, "output projection"),
    ]  # fmt: skip
    assert found[6:11] == [
        ("h.0", "ln_2"), ("h.0", "MLP", "expansion"), ("h.0", "MLP", "activation"), ("h.0", "MLP", "projection"),
        ("h.0", "MLP", "projection"),
    ]  # fmt: skip
    assert found[-3:] == [("ln_f",), ("LM head",), ()]
    assert by_products(names[:-2], 2) == [None] * (len(names) - 2)
    assert by_products(["elementwise"], 2) == [None]


def test_copies_are_the_steps_own() -> None:
    ops = [("layernorm", ("a",)), ("matmul", ("b",))]
    names = ["Memcpy HtoD", "warpline_layernorm", "gemm", "Memset (Device)"]
    assert placed(names, ops) == [(), ("a",), ("b",), ()]
    assert placed(["warpline_admit", *names, "warpline_report"], ops) == [(), (), ("a",), ("b",), (), ()]
    assert placed(["CatArrayBatchedCopy", *names], ops) == [(), (), ("a",), ("b",), ()]
    assert by_products(["Memcpy DtoD", *["gemm"] * 9], 2)[:2] == [(), ("h.0", "attention", "QKV projection")]


def test_stamps() -> None:
    """Two blocks, three tokens, clocks that begin anywhere and run twice as fast as a nanosecond."""
    modules = stages(2)
    count = len(modules)
    assert count == 2 * 9 + 3
    clocks = [
        [10_000 * block + 2000 * i + (100 if block else 0) * (i % 2) for i in range(3 * count)] for block in (0, 1)
    ]
    each = stamps.stage_times(clocks, count, token_us=count * 1.0)
    assert sum(each) == pytest.approx(count)
    assert each[0] == pytest.approx(1.0, rel=0.05)
    with pytest.raises(ValueError, match="two tokens"):
        stamps.stage_times([[1] * count], count, 1.0)
    runs = [count + 1.0, count - 1.0, float(count)]
    means = dict(zip(modules, each, strict=True))
    phase = stamps.stamped_phase("decode", means, 1 / 3, 2, runs, float(count), Work(1, 8, 1, naive=False))
    assert (phase.step_us, phase.fastest_us, phase.slowest_us) == (count, count - 1, count + 1)
    assert sum(row.us for row in phase.kernels) == pytest.approx(phase.busy_us)
    by_class = {row.kind: row.calls for row in classes(phase)}
    assert by_class == {"exchange": 2 * 4 + 2, "GEMM": 2 * 4 + 1, "attention": 2}
    root = tree.build(phase)
    assert root.us == pytest.approx(count)
    assert root.find(BLOCKS, "attention", "output projection + residual 1", "heads gathered") is not None
    assert phase.gap_us == 0


def test_recorded_session_knows_where_it_comes_from(recorded: Session) -> None:
    assert {"commit", "torch", "device", "time", "source"} <= set(recorded.origin)
    assert recorded.read_gb_s > 0 < recorded.product_tflop_s


def test_a_step_lost_in_noise_is_not_given_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens took longer than whole generations: the recorded steps count, and the session says so."""
    monkeypatch.setattr(recording, "interleave", lambda *_, **__: [("decode", s) for s in (0.7, 0.5) * 3])
    request = ProfileRequest(
        method="torch", model=SMALL, dtype="fp32", device="cpu", context=8, steps=2, phases=("decode",)
    )
    session = collect(request)
    (phase,) = session.phases
    assert phase.plain_us == phase.step_us
    assert any("noise" in note for note in session.notes)
