"""How many steps are taken before the host looks, and what a batch says it took."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL, watch_steps
from tests.engine.test_engine import GREEDY, random_prompts
from warpline import LLM, SamplingParams
from warpline.engine.engine import FIRST_CHUNK
from warpline.engine.executor import Executor
from warpline.engine.sequence import total
from warpline.engine.state import Request, State
from warpline.model.weights import load


class _Unseen(Executor):
    """As on a GPU where nothing runs: only how many steps it would take."""

    chunk = 5

    def __init__(self, device: str, stops: bool):
        super().__init__(load(SMALL), torch.device(device), "fp32")
        self._stops = stops

    def stops_by_itself(self, state: State) -> bool:
        return self._stops

    def _prefill(self, state: State) -> None:
        pytest.fail("nothing is computed here")

    def _decode(self, state: State, n: int) -> None:
        pytest.fail("nothing is computed here")


@pytest.mark.parametrize(
    ("device", "stops", "may_end", "steps"),
    [("cuda", True, True, 70), ("cuda", False, False, 70), ("cuda", False, True, 5), ("cpu", True, False, 5)],
)
def test_steps_where_nobody_reads_along(device: str, stops: bool, may_end: bool, steps: int) -> None:
    """All at once, unless steps could be wasted or somebody who wants to interrupt would wait for long."""
    llm = LLM(SMALL)
    state = llm.executor.allocate(1, 80)
    state.begin([Request([1], SamplingParams(ignore_eos=not may_end), 0, 0, 80)])
    executor = _Unseen(device, stops)
    assert executor.at_once(state, 70) == steps
    assert executor.at_once(state, 3) == 3


def test_generate_looks_only_when_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for a text that nobody follows; stop texts and streams are looked for in chunks."""
    llm = LLM(SMALL)
    asked = watch_steps(llm.executor, monkeypatch)
    monkeypatch.setattr(llm.executor, "at_once", lambda _, left: left)
    assert llm.generate("Hello", replace(GREEDY, max_tokens=30))[0].timings.decode_steps == 29
    assert asked == [29]
    asked.clear()
    llm.generate("Hello", replace(GREEDY, max_tokens=30, stop=["never said"]))
    assert asked[0] == min(FIRST_CHUNK, llm.executor.chunk)
    assert sum(asked) == 29
    asked.clear()
    list(llm.stream("Hello", replace(GREEDY, max_tokens=30)))
    assert len(asked) > 1


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_timings(chunk: int) -> None:
    llm = LLM(SMALL)
    llm.executor.chunk = chunk
    (completion,) = llm.generate("Hello", SamplingParams(max_tokens=5, ignore_eos=True))
    assert completion.timings.decode_steps == 4
    assert completion.timings.seconds > completion.timings.prefill_seconds > 0
    bandwidth = completion.timings.gb_per_second
    assert bandwidth is not None
    assert bandwidth > 0
    (single,) = llm.generate("Hello", SamplingParams(max_tokens=1))
    assert single.timings.gb_per_second is None


def test_timings_of_several_turns_add_up() -> None:
    turns = LLM(SMALL, max_batch=2)
    completions = turns.generate(random_prompts(5, 4), SamplingParams(max_tokens=6, ignore_eos=True))
    whole = total(completions)
    assert whole.decode_steps == 3 * 5
    parts = [completions[i].timings for i in (0, 2, 4)]
    assert whole.seconds == pytest.approx(sum(part.seconds for part in parts))
    assert whole.decode_bytes == sum(part.decode_bytes for part in parts)
