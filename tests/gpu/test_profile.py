"""The profiler on a GPU: every method's modules sum to the step and its kernels to the busy time, executors are placed
by their tables, and the persistent kernel shows its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SMALL
from warpline.cli.main import main
from warpline.profile import recorders, tree
from warpline.profile.classify import classes, classify
from warpline.profile.collect import ProfileRequest, collect
from warpline.profile.compare import compare
from warpline.profile.names import BLOCKS
from warpline.profile.roofline import whole
from warpline.profile.session import Session, dumps, loads, read
from warpline.profile.verdict import verdict

pytestmark = [  # warnings of torch
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]


def profiled(method: str, **changes: Any) -> Session:
    torch._dynamo.reset()
    usual: dict[str, Any] = {"model": SMALL, "dtype": "fp16", "device": "cuda", "context": 20, "steps": 6}
    return collect(ProfileRequest(method=method, **usual | changes))


METHODS = ["naive", "torch", "hf-eager", "hf-sdpa", "static-kv", "static-kv-graph", "kernels", "graph", "persistent"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [1, 3])
def test_sums(method: str, batch: int) -> None:
    session = profiled(method, batch=batch)
    for phase in session.phases:
        root = tree.build(phase)
        assert root.us == pytest.approx(phase.step_us, rel=0.02)
        assert sum(row.us for row in phase.kernels) == pytest.approx(phase.busy_us, rel=0.02)
        assert phase.launches.kernels > 0
    assert loads(dumps(session)).method == method


@pytest.mark.parametrize("method", ["naive", "torch", "hf-sdpa", "kernels", "graph", "persistent"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_modules_are_seen(method: str, phase: str) -> None:
    session = profiled(method, phases=(phase,))
    assert not [note for note in session.notes if "noise" not in note]  # other tests may share the GPU
    block = tree.build(session.phases[0]).find(BLOCKS)
    assert block is not None
    assert {"attention", "MLP"} <= set(block.children)
    blocks = tree.build(session.phases[0], merge=False).children
    assert {"h.0", "h.1", "h.2"} <= set(blocks)


@pytest.mark.parametrize("batch", [1, 64, 200])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graphs_are_placed_by_their_table(batch: int, phase: str) -> None:
    session = profiled("graph", batch=batch, phases=(phase,))
    found = session.phases[0]
    lost = [row for row in found.kernels if not row.path and classify(row.name) not in ("memory", "elementwise")]
    assert not lost, [row.name for row in lost]  # except for the kernels that take the prompts in
    assert not [note for note in session.notes if "noise" not in note]  # other tests may share the GPU
    assert found.launches.graphs == 1 if phase == "decode" else found.launches.graphs >= 1


@pytest.mark.parametrize("method", ["torch", "graph", "static-kv-graph"])
def test_the_timeline_has_whole_steps(method: str) -> None:
    """The host's work for a step and the step's kernels, which may run much later."""
    for phase in profiled(method).phases:
        steps = [moment for moment in phase.timeline if moment.track == "step"]
        kernels = [moment for moment in phase.timeline if moment.track == "gpu"]
        assert len(kernels) == pytest.approx(len(steps) * phase.launches.kernels, rel=0.1)
        for step in steps:
            inside = [m for m in kernels if step.start <= m.start < step.start + step.us]
            assert inside
            assert max(m.start + m.us for m in inside) <= step.start + step.us + 0.05
        assert [m for m in phase.timeline if m.track == "host"]


@pytest.mark.alone
@pytest.mark.parametrize("method", ["graph", "static-kv-graph"])
def test_what_lies_between_two_prompts_is_not_counted(method: str) -> None:
    phase = profiled(method, model="random:gpt2", phases=("prefill",)).phases[0]
    assert phase.fastest_us < 1.5 * phase.plain_us + 300  # recording has a cost


@pytest.mark.alone
@pytest.mark.parametrize("method", ["graph", "persistent"])
@pytest.mark.parametrize("model", ["stories", "random:gpt2"])
def test_nothing_is_faster_than_the_gpu(method: str, model: str) -> None:
    session = profiled(method, model=model, context=128)
    for phase in session.phases:
        assert whole(session, phase).share <= 1
        assert verdict(session, phase)


@pytest.mark.alone
def test_strongest_torch_is_profiled() -> None:
    session = profiled("static-kv-compile")
    assert session.phase("decode").launches.graphs == 1
    assert session.notes  # either placed by the order of its products, or reported as unplaced


@pytest.mark.alone
def test_the_host_is_the_bottleneck_of_eager_torch() -> None:
    phase = profiled("torch", model="random:gpt2").phase("decode")
    assert phase.gap_us > phase.busy_us
    assert phase.launches.count > 100
    assert phase.launches.host_us > 0


@pytest.mark.alone
def test_stages_of_the_persistent_kernel() -> None:
    phase = profiled("persistent", model="random:gpt2").phase("decode")
    assert phase.source == "stamps"
    assert all(row.us >= 0 for row in phase.spans)
    assert phase.slowdown < 1.3
    assert phase.launches.count < 1
    assert {row.kind for row in classes(phase)} == {"GEMM", "attention", "exchange"}


@pytest.mark.alone
def test_the_persistent_kernels_stages_compare_with_the_graphs_kernels() -> None:
    graph, persistent = (profiled(method, phases=("decode",)) for method in ("graph", "persistent"))
    (found,) = compare(graph, persistent)
    both = {change.name for change in found.modules if change.before is not None and change.after is not None}
    assert {"ln_1 + QKV projection", "projection + residual 2", "ln_f + LM head"} <= both


def test_without_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*_: Any) -> Any:
        raise recorders.CuptiMissingError("torch.profiler sees nothing of this GPU")

    monkeypatch.setattr(recorders, "by_kineto", blind)
    session = profiled("torch")
    assert {phase.source for phase in session.phases} == {"events"}
    assert "modules are timed by events" in session.notes[0]
    for phase in session.phases:
        assert tree.build(phase).us == pytest.approx(phase.step_us, rel=0.02)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["profile", "graph", "-m", SMALL, "--context", "16", "--steps", "3", "--session", str(tmp_path / "a.json")]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--html", str(tmp_path / "a.html"), "--trace", str(tmp_path / "a.json.gz"), "--gpu", "t4"])
    assert not caught.value.code
    assert "GPU busy" in capsys.readouterr().out
    assert read(tmp_path / "a.json").kind == "cuda"


def test_several_in_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["profile", "graph,kernels", "torch:fp32", "cpu", "-m", SMALL, "--context", "16", "--steps", "3"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--device", "cuda", "--save", str(tmp_path)])
    assert caught.value.code == 2
    assert "1 of 4 methods were not profiled: cpu:fp16" in capsys.readouterr().err
    assert {read(path).method for path in tmp_path.rglob("*.json")} == {"graph", "kernels", "torch"}
