"""GPU code with stand-ins: CUDA events that read the host's clock, a kernel that only stamps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from tests.conftest import SMALL
from tests.profile.conftest import stages
from warpline.bench import methods
from warpline.bench.methods.ours import OnPersistent
from warpline.engine import executors
from warpline.engine.executors.base import Executor
from warpline.engine.executors.persistent.executor import PersistentExecutor
from warpline.engine.request import Span
from warpline.engine.slots import Slots
from warpline.model.weights import load, read_config
from warpline.profile import recorders, stamps, tree
from warpline.profile.collect import ProfileRequest
from warpline.profile.events import aggregate
from warpline.profile.names import BLOCKS
from warpline.profile.session import Work


class HostEvent:
    """A torch.cuda.Event for the host."""

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
    one = ProfileRequest(method="torch", model=SMALL, dtype="fp32", device="cpu", context=12, steps=4)
    weights = load(SMALL)
    prompts = torch.randint(weights.config.vocab_size, (1, 12))
    method = methods.find("torch")(weights, one.case, torch.device("cpu"))
    given = method.given(prompts)
    method.generate(given, one.case.new)
    events = recorders.by_events(method, given, one.case.new, 1)
    found = aggregate(events, expected=one.case.new, skip=3, on_gpu=True)
    assert len(found.steps) == 4
    paths = {row.path for row in found.spans}
    assert {("h.2", "attention", "fused attention"), ("LM head",)} <= paths
    whole = sum(row.us for row in found.spans)
    assert whole == pytest.approx(sum(found.steps) / 4)
    assert found.unplaced == 0


def test_stamps_are_asked_for_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    config, count = read_config(SMALL), len(stages(3))
    asked: list[tuple[int, int]] = []

    class Stamping(PersistentExecutor):
        """Launches that only stamp: five blocks, the third stage of a layer as long as the others together."""

        def __init__(self) -> None:
            Executor.__init__(self, load(SMALL), torch.device("cpu"), "fp16")
            self.tokens = 0

        @contextmanager
        def stamped(self, tokens: int) -> Iterator[torch.Tensor]:
            self.tokens, self.clocks = tokens, torch.zeros(5, tokens * count, dtype=torch.int64)
            yield self.clocks
            self.tokens = 0

        def allocate(self, count: int, capacity: int) -> Slots:
            return Slots(config, count, capacity, device=self.device, dtype=torch.float32)

        def compile_ahead(self, slots: Slots, lanes: Sequence[int]) -> None:
            pass

        def screens(self, slots: Slots, lanes: Sequence[int]) -> bool:
            return True

        def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
            time.sleep(0.02)  # not counted

        def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
            asked.append((n, self.tokens))
            long = torch.tensor([8 if i % 9 == 2 and i < 27 else 1 for i in range(count)])
            self.clocks[:] = long.repeat(self.tokens).cumsum(0)
            time.sleep(0.001 * n)

    one = ProfileRequest(method="persistent", model=SMALL, dtype="fp16", device="cpu", context=4, steps=6)
    monkeypatch.setattr(executors, "create", lambda *_: Stamping())
    method = OnPersistent(load(SMALL), one.case, torch.device("cpu"))
    found = method.stamped(method.given(torch.zeros(1, 4, dtype=torch.int64)), 7, stamps.RUNS)
    assert asked == [(7, 7)] * (1 + stamps.RUNS)
    assert len(found.us) == stamps.RUNS
    phase = stamps.decode_phase(found, 6, 1000.0, Work(1, 4, 1, naive=False))
    assert phase.step_us == pytest.approx(1000, rel=0.5)
    assert phase.work.screened
    root = tree.build(phase)
    assert root.us == pytest.approx(phase.step_us, rel=0.02)
    attention = root.find(BLOCKS, "attention", "KV cache + fused attention")
    assert attention is not None
    assert attention.us == pytest.approx(phase.step_us * 24 / 51)
