"""Sequences that join and leave: each gives the same as alone, whatever it is batched with."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.arrivals import Alone, Arrival, check_alone, random_params, random_prompt, run_arrivals
from warpline import LLM, SamplingParams
from warpline.engine.executors import Executor
from warpline.errors import ModelError
from warpline.model.weights import Weights, load

TINY = "random:n_layer=2,n_head=2,n_embd=32,n_positions=128,vocab_size=300,seed=3"


def make(executor: str, max_batch: int = 5) -> LLM:
    return LLM(TINY, device="cpu", executor=executor, max_batch=max_batch)


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(make("torch"))


@pytest.mark.parametrize(("executor", "count"), [("cpu", 300), ("torch", 300), ("kernels", 40)])
@pytest.mark.parametrize(("budget", "ahead"), [(9, True), (2048, False), (2048, True)])
def test_random_arrivals(executor: str, count: int, budget: int, ahead: bool, alone: Alone) -> None:
    """Also with prompts in chunks of nine tokens, and with the next turn launched before the last has ended."""
    llm = make(executor)
    planner = llm.engine.scheduler
    planner.prompt_tokens, planner.overlaps = budget, ahead
    arrivals = run_arrivals(llm, count, seed=budget, longest=100)
    assert check_alone(alone, arrivals) == 0
    assert sum(a.cancelled for a in arrivals) > count // 100
    assert llm.engine.stats.requests == count
    if budget > 9:
        assert llm.engine.stats.lane_steps > 1.5 * llm.engine.stats.steps  # they did share launches


class Machine(RuleBasedStateMachine):
    """The same in histories that hypothesis generates and shortens."""

    def __init__(self) -> None:
        super().__init__()
        self.llm, self.arrivals = LLMS["cpu"], list[Arrival]()
        self.llm._worker.wake = lambda: None  # type: ignore[method-assign]

    @initialize(ahead=st.booleans())
    def launch_ahead(self, ahead: bool) -> None:
        """With the next turn launched ahead, as on a GPU, or not."""
        self.llm.engine.scheduler.overlaps = ahead

    @rule(seed=st.integers(0, 2**32), times=st.integers(1, 4))
    def submit(self, seed: int, times: int) -> None:
        rng = random.Random(seed)
        for _ in range(times):
            prompt, params = random_prompt(rng, 300, 100), random_params(rng, longest=28)
            self.arrivals.append(Arrival(prompt, params, self.llm.submit(prompt, params)))

    @rule()
    def step(self) -> None:
        self.llm.engine.step()

    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        if self.arrivals:
            chosen = self.arrivals[which % len(self.arrivals)]
            if not chosen.handle.finished:
                chosen.handle.cancel()
                chosen.cancelled = True

    @rule(seed=st.integers(0, 99))
    def generate(self, seed: int) -> None:
        """Generate for another caller in between."""
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=9)
        expected = LLMS["alone"].generate([[5, 6], [7]], params)
        assert [c.token_ids for c in self.llm.generate([[5, 6], [7]], params)] == [c.token_ids for c in expected]

    @invariant()
    def slots_are_counted(self) -> None:
        engine = self.llm.engine
        assert engine.free + len(engine.scheduler.running) == engine.count

    def teardown(self) -> None:
        while self.llm.engine.step():
            pass
        assert check_alone(Alone(LLMS["alone"]), self.arrivals) == 0


LLMS: dict[str, LLM] = {}


@pytest.fixture(scope="module", autouse=True)
def llms() -> None:
    LLMS["cpu"], LLMS["alone"] = make("cpu", 3), make("torch")


def test_histories() -> None:
    Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
    Machine.TestCase().runTest()


@pytest.mark.parametrize("executor", ["cpu", "torch", "kernels"])
@pytest.mark.parametrize("max_batch", [2, 8])
def test_completions_of_one_prompt_run_it_once(executor: str, max_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompt = make(executor, max_batch), [3, 1, 4, 1, 5, 9, 2, 6]
    rows = watch_rows(llm.executor, monkeypatch)
    params = SamplingParams(temperature=1.0, n=6, seed=7, max_tokens=8, ignore_eos=True)
    found = llm.generate(prompt, params)
    assert len({c.token_ids for c in found}) == 6
    if max_batch >= 6:
        assert sum(rows) == len(prompt)
    assert [c.token_ids for c in found] == [c.token_ids for c in make("torch", 1).generate(prompt, params)]


@pytest.mark.parametrize("executor", ["cpu", "torch", "kernels"])
@pytest.mark.parametrize(("max_batch", "budget"), [(2, 2048), (16, 2048), (16, 30)])
def test_a_shared_prefix_runs_once(executor: str, max_batch: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    common = [rng.randrange(300) for _ in range(70)]
    prompts = [[*common, *(rng.randrange(300) for _ in range(rng.randint(1, 30)))] for _ in range(9)]
    prompts += [common, prompts[2], [9, 9], common[:50]]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    llm = make(executor, max_batch)
    llm.engine.scheduler.prompt_tokens = budget
    rows = watch_rows(llm.executor, monkeypatch)
    found = llm.generate(prompts, params)
    expected = [make("torch", 1).generate(prompt, params)[0].token_ids for prompt in prompts]
    assert [c.token_ids for c in found] == expected
    if max_batch == 16:
        assert sum(rows) <= 69 + sum(len(p) - 69 for p in prompts[:11]) + 2 + 50


def watch_rows(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of positions of every pass over prompts."""
    rows: list[int] = []
    prefill = executor.prefill

    def watched(slots, spans) -> None:  # type: ignore[no-untyped-def]
        rows.append(sum(span.end - span.start for span in spans))
        prefill(slots, spans)

    monkeypatch.setattr(executor, "prefill", watched)
    return rows


def test_a_cancelled_request_leaves_its_slot_within_a_turn() -> None:
    llm = make("cpu", 1)
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    first, second = llm.submit([1, 2], params), llm.submit([3], params)
    llm.engine.step()
    llm.engine.step()
    assert len(first.token_ids) > 0
    assert second.token_ids == ()
    first.cancel()
    assert first.result().finish_reason == "cancelled"
    llm.engine.step()
    llm.engine.step()
    assert len(second.token_ids) > 0
    second.cancel()
    assert llm.engine.free == 1


def test_a_cancel_holds_while_its_tokens_are_taken_in() -> None:
    """The cancel comes from another thread, between the end of the turn and its text."""
    llm = make("cpu", 1)
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    handle = llm.submit([1, 2], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1))
    receive = handle._job.receive
    assert receive is not None

    def cancelled(tokens: list[int]) -> int | None:
        handle.cancel()
        return receive(tokens)

    handle._job.receive = cancelled
    while llm.engine.step():
        pass
    found = handle.result(timeout=0)
    assert found.finish_reason == "cancelled"
    assert len(found.logprobs or ()) == len(found.token_ids) > 0
    assert llm.engine.free == 1


def test_a_stream_is_launched_ahead_unless_something_waits() -> None:
    llm = make("cpu", 2)
    llm.engine.scheduler.overlaps = True
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    first = llm.submit([1, 2], params)
    llm.engine.step()
    assert [flight.turn.steps for flight in llm.engine._flights] == [4]  # the first token is known, more is on its way
    second = llm.submit([3], params)
    llm.engine.step()
    assert not llm.engine._flights  # a new request does not wait for more than was enqueued
    while llm.engine.step():
        pass
    assert [len(handle.token_ids) for handle in (first, second)] == [100, 100]


def test_a_first_token_does_not_wait_for_the_steps_of_others() -> None:
    llm = make("cpu", 2)
    llm.engine.scheduler.overlaps = True
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    old = llm.submit([3], params)
    llm.engine.step()
    stream = llm.stream([1, 2], params)
    text = next(stream)
    (flight,) = llm.engine._flights
    assert len(flight.reports) == 1  # of two
    assert (flight.turn.steps, len(flight.turn.running)) == (4, 2)
    assert text + "".join(stream) == llm.generate([1, 2], params)[0].text
    assert old.result(timeout=0).text == llm.generate([3], params)[0].text


def test_a_dropped_stream_leaves_nothing() -> None:
    llm = make("cpu", 2)
    for close in (True, False):
        stream = llm.stream([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        if close:
            stream.close()
        else:
            del stream
            gc.collect()
        assert llm.engine.free == 2
        assert llm.engine.idle


@pytest.mark.parametrize("executor", ["cpu", "torch", "kernels"])
def test_a_request_that_breaks_harms_no_other(executor: str, save_folder: Callable[[Weights], Path]) -> None:
    """Its logits are NaN from position 50 on; the others end before it, in the same launches."""
    weights = load(TINY)
    weights.tensors["wpe.weight"][50] = torch.nan
    broken = LLM(str(save_folder(weights)), device="cpu", executor=executor, max_batch=4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    handles = [broken.submit(prompt, params) for prompt in ([1], [2] * 40, [2] * 60, [3])]
    for i in (1, 2):
        with pytest.raises(ModelError, match="no numbers"):
            handles[i].result(timeout=60)
    expected = [c.token_ids for c in make(executor).generate([[1], [3]], params)]
    assert [handles[i].result(timeout=60).token_ids for i in (0, 3)] == expected
    assert broken.engine.free == 4
    again = broken.generate([[1], [3], [1], [3]], params)  # in any slots
    assert [c.token_ids for c in again] == expected * 2
