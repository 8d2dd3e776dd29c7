"""What only a GPU runs, with a stand-in for it: CUDA events that read the host's clock, a kernel that only stamps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.conftest import SMALL
from warpline.bench import methods
from warpline.bench.methods.ours import OnPersistent
from warpline.engine.persistent_exec import PersistentExecutor
from warpline.kernels.persistent import Extents
from warpline.model.weights import load, read_config
from warpline.profile import collect as recording
from warpline.profile import stamps, tree
from warpline.profile.collect import Wish
from warpline.profile.events import aggregate
from warpline.profile.names import BLOCKS
from warpline.profile.session import Work


class HostEvent:
    """As torch.cuda.Event, for a device that is the host."""

    def __init__(self, *, enable_timing: bool):
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: HostEvent) -> float:
        return 1e3 * (other.at - self.at)


def test_modules_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    one = Wish(method="torch", model=SMALL, dtype="fp32", device="cpu", context=12, steps=4)
    weights = load(SMALL)
    prompts = torch.randint(weights.config.vocab_size, (1, 12))
    method = methods.find("torch")(weights, one.case, torch.device("cpu"))
    method.generate(prompts, one.case.new)
    events = recording._by_events(method, prompts, one.case.new, 1)
    found = aggregate(events, expected=one.case.new, skip=3, on_gpu=True)
    assert len(found.steps) == 4
    paths = {row.path for row in found.spans}
    assert {("h.2", "attention", "fused attention"), ("LM head",)} <= paths
    whole = sum(row.us for row in found.spans)
    assert whole == pytest.approx(sum(found.steps) / 4)
    assert found.unplaced == 0


def test_stamps_are_asked_for_and_taken_away_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    config = read_config(SMALL)
    extents = Extents(
        dtype="fp16", width=64, inner=256, heads=4, layers=3, vocab=config.vocab_size, rows=1, blocks=5, arch="sm_90"
    )
    executor = object.__new__(PersistentExecutor)
    executor.config, executor.extents, executor.device = config, extents, torch.device("cpu")
    executor.stamps = None
    asked: list[tuple[int, int]] = []

    def decode(_: Any, n: int) -> None:
        """A launch whose blocks stamp every stage, the third of a layer taking as long as the others together."""
        asked.append((n, executor.extents.stamped_tokens))
        assert executor.stamps is not None
        count = len(stamps.stages(3))
        assert executor.stamps.shape == (5, executor.extents.stamped_tokens * count)
        long = torch.tensor([8 if i % 9 == 2 and i < 27 else 1 for i in range(count)])
        executor.stamps[:] = long.repeat(executor.extents.stamped_tokens).cumsum(0)
        time.sleep(0.001 * n)

    monkeypatch.setattr(PersistentExecutor, "_decode", lambda _, state, n: decode(state, n))

    def generate(_: Any, new: int) -> None:
        time.sleep(0.02)  # a prompt, which does not count
        executor._decode(cast(Any, None), new - 1)

    method = cast(OnPersistent, SimpleNamespace(_executor=executor, generate=generate))
    phase = stamps.decode_phase(method, torch.zeros(1, 4), 6, 1000.0, Work(1, 4, 1, naive=False))
    assert set(asked) == {(7, 7)}
    assert (executor.extents, executor.stamps) == (extents, None)
    assert "_decode" not in vars(executor)
    assert phase.step_us == pytest.approx(1000, rel=0.5)
    root = tree.build(phase)
    assert root.us == pytest.approx(phase.step_us, rel=0.02)
    attention = root.find(BLOCKS, "attention", "KV cache + fused attention")
    assert attention is not None
    assert attention.us == pytest.approx(phase.step_us * 24 / 51)
