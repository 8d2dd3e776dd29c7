"""The counters of an engine, and its limits."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.conftest import SMALL, make_weights
from tests.engine.running import run
from warpline import LLM, SamplingParams
from warpline.config import ModelConfig
from warpline.engine.clock import Clock
from warpline.engine.engine import Engine
from warpline.engine.executors import create
from warpline.engine.executors.persistent import executor as persistent
from warpline.engine.executors.persistent.executor import PersistentExecutor
from warpline.engine.request import Request
from warpline.engine.scheduler import Sequence
from warpline.engine.slots import Slots
from warpline.errors import ConfigError
from warpline.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(SMALL, device="cpu", dtype="fp32")


@pytest.mark.parametrize(("ignore", "wasteful"), [((True, True), False), ((True, False), True), ((False, False), True)])
def test_steps_can_be_wasted_if_any_sequence_may_end(ignore: tuple[bool, ...], wasteful: bool) -> None:
    config = SimpleNamespace(eos_token_id=5, vocab_size=9)
    executor = SimpleNamespace(config=config, stops_by_itself=lambda lanes, needs: False)
    params = [SamplingParams(ignore_eos=one) for one in ignore]
    running = [SimpleNamespace(request=SimpleNamespace(params=one)) for one in params]
    engine = cast(Engine, SimpleNamespace(executor=executor))
    assert Engine._wasteful(engine, cast(list[Sequence], running)) is wasteful


def test_steps_are_those_of_the_longest_row(llm: LLM) -> None:
    asked = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 9)]
    found = llm.generate(["Hello", "There"], asked)
    assert [len(one.token_ids) for one in found] == [3, 9]
    assert found[0].timings.decode_steps == 8


def test_a_text_that_just_fits_is_scored(llm: LLM) -> None:
    most = llm.config.n_positions - 2  # one end of text before it and one after it
    text = " the" * most
    assert len(Tokenizer.gpt2().encode(text)) == most
    assert llm.score([text]).tokens == most + 1
    with pytest.raises(ConfigError, match=f"at most {most:,} can be scored"):
        llm.score([text + " the"])


def test_settings_of_the_command_reach_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from warpline.cli import generate as verb
    from warpline.engine import llm as module

    seen: dict[str, Any] = {}

    def generate(self: LLM, prompts: Any, params: SamplingParams) -> Any:
        seen["params"] = params
        return real(self, prompts, params)

    real = LLM.generate
    monkeypatch.setattr(module.LLM, "generate", generate)
    options = {"min_p": 0.2, "top_p": 0.7, "top_k": 3, "temperature": 0.5, "repetition_penalty": 1.1, "seed": 7}
    more = {"presence_penalty": 0.1, "frequency_penalty": 0.2, "n": 2}
    written: list[str] = []
    monkeypatch.setattr(verb, "_write", written.append)
    verb.generate("Hello", model=SMALL, max_new_tokens=4, as_json=True, device="cpu", **options, **more)  # type: ignore[arg-type]
    assert {name: getattr(seen["params"], name) for name in (*options, *more)} == options | more
    assert seen["params"].max_tokens == 4


def test_what_the_command_says_of_times_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from warpline.cli import generate as verb

    written: list[str] = []
    monkeypatch.setattr(verb, "_write", written.append)
    verb.generate("Hello", model=SMALL, max_new_tokens=9, as_json=True, device="cpu", temperature=0)
    said = json.loads(written[0])
    decode = 8 / said["decode_tokens_per_second"]
    assert said["first_token_seconds"] + decode == pytest.approx(said["seconds"], rel=1e-2)
    assert said["new_tokens"] == 9


def test_a_context_longer_than_a_hidden_row() -> None:
    """A head needs as many scores as there are positions."""
    weights = make_weights(ModelConfig(n_layer=1, n_head=2, n_embd=8, n_inner=8, n_positions=300, vocab_size=50))
    params = SamplingParams(temperature=0, ignore_eos=True)
    asked = [Request([3, 1, 4] * size, params, 0, i, 3 * size + 90) for i, size in enumerate((66, 1))]
    both = (run(create(name, weights, torch.device("cpu"), "fp32"), asked) for name in ("cpu", "torch"))
    assert next(both) == next(both)


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize(("prompts", "steps"), [(True, False), (False, True), (True, True)])
def test_the_clock_of_a_cpu_asks_no_gpu(
    prompts: bool, steps: bool, followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not a reader follows, a turn's time is the host's, and is divided where prompts and steps share it."""
    now = iter([10.0, 12.0, 17.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock(cuda=False)
    clock.begin(prompts=prompts, steps=steps, followed=followed)
    clock.prompted()
    clock.stepped()
    clock.landed()
    assert clock.seconds() == ((2.0, 5.0) if prompts and steps else (7.0, 0.0) if prompts else (0.0, 7.0))


def test_the_clock_of_a_gpu_asks_where_prompts_and_steps_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded at the ends of prompts and steps only there, and at the begin only where a reader follows."""
    recorded: list[int] = []

    class Event:
        def __init__(self, **_: Any) -> None:
            self.number = len(made)
            made.append(self)

        def record(self) -> None:
            recorded.append(self.number)

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.number - self.number)

    for prompts, steps, followed, expected in (
        (True, True, False, [1, 2]), (True, True, True, [0, 1, 2]), (True, False, False, []),
        (False, True, True, [0, 1, 2]),
    ):  # fmt: skip
        made: list[Event] = []
        recorded.clear()
        monkeypatch.setattr(torch.cuda, "Event", Event)
        clock = Clock(cuda=True)
        clock.begin(prompts=prompts, steps=steps, followed=followed)
        clock.prompted()
        clock.stepped()
        clock.landed()
        assert recorded == expected
        whole, part = clock.seconds()
        if followed:
            assert whole + part == 2.0
        if prompts and steps:
            assert part == 1.0


@pytest.mark.parametrize(
    ("count", "most", "rows"), [(1, 8, [1]), (3, 8, [1, 2, 4]), (8, 8, [1, 2, 4, 8]), (64, 4, [1, 2, 4])]
)
def test_programs_for_every_power_of_two(
    count: int, most: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, bool]] = []

    def decoder(lanes: int, *, filters: bool) -> SimpleNamespace:
        made.append((lanes, filters))
        return SimpleNamespace(program=None)

    monkeypatch.setattr(persistent, "compile_many", lambda jobs: jobs)
    executor = SimpleNamespace(
        extents=SimpleNamespace(most_rows=most, arch="sm_90"), _with=decoder, _loaded=made.append
    )
    PersistentExecutor.prepare_all(cast(PersistentExecutor, executor), cast(Slots, SimpleNamespace(count=count)))
    assert [entry for entry in made if isinstance(entry, tuple)] == [(n, f) for n in rows for f in (False, True)]
