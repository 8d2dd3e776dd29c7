"""An int8 KV cache through the engine: kernels, by their references, compute what the torch executor computes with
rounded keys and values; and a text does not depend on how its prompt is split."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL
from tests.engine.running import news, run
from warpline import LLM, SamplingParams
from warpline.config import EngineConfig
from warpline.engine.executors import Executor, auto, create
from warpline.engine.executors.graph.kernels import KernelsExecutor
from warpline.engine.executors.graph.prompts import rounded_rows
from warpline.engine.executors.graph.schedule import End, PassRules, decode_step
from warpline.engine.request import Request, Span
from warpline.errors import ConfigError
from warpline.model.weights import load

CPU = torch.device("cpu")
INT8 = EngineConfig(kv_dtype="int8")
NAMES = pytest.mark.parametrize("name", ["torch", "kernels"])
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=14)


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(50257) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def make(name: str, window: int | None = None) -> Executor:
    weights = load(SMALL)
    return create(name, replace(weights, config=replace(weights.config, window=window)), CPU, "fp32", INT8)


@pytest.fixture(scope="module")
def pair() -> tuple[LLM, LLM]:
    return tuple(LLM(SMALL, device="cpu", executor=name, kv_dtype="int8") for name in ("kernels", "torch"))  # type: ignore[return-value]


def differ_by_rounding(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether codes or scales differ by rounding: another order of sums moves a number by some 2^-22, so that scales
    agree to far more than a thousandth, and of a thousand codes hardly one is near enough to the middle to change."""
    off = (ours.float() - theirs.float()).abs()
    return bool(off.max() <= 1 and (off > 1e-3).float().mean() < 1e-3)


@pytest.mark.parametrize("count", [1, 3, 8, 9])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, max_tokens=12, seed=4, top_k=30)])
def test_kernels_write_what_torch_writes(pair: tuple[LLM, LLM], count: int, params: SamplingParams) -> None:
    found, expected = ([c.token_ids for c in llm.generate(prompts(count), params)] for llm in pair)
    assert found == expected


def test_they_compute_the_same_logits_and_cache() -> None:
    """They agree to float32's rounding, which rarely changes a code whose number is between two codes."""
    request, seen, caches = Request(prompts(1)[0], GREEDY, 0, 0, 40), [], []
    for name in ("kernels", "torch"):
        executor = make(name)
        slots = executor.allocate(2, 40)
        (slot,) = slots.admit([request])
        executor.prefill(slots, [Span(slot, 0, len(request.prompt), (slot,))])
        seen.append(executor.observe(slots, [slot])["logits"])
        caches.append([tensor[:, slot, :, : len(request.prompt) + 1] for tensor in slots.cache.tensors])
    # One code of a few hundred that flips moves a key or a value by 1/127 of its largest number.
    assert (seen[0] - seen[1]).abs().max() < 2e-3 * seen[0].std()
    for ours, theirs in zip(*caches, strict=True):
        assert differ_by_rounding(ours, theirs)


@NAMES
@pytest.mark.parametrize("window", [None, 5])
def test_a_text_does_not_depend_on_how_its_prompt_is_cut(name: str, window: int | None) -> None:
    executor = make(name, window)
    for i, prompt in enumerate(prompts(4)):
        request = Request(prompt, GREEDY, 0, i, len(prompt) + 12)
        (whole,) = run(executor, [request])
        for size in (1, 4, 9):
            slots = executor.allocate(2, request.limit)
            (slot,) = slots.admit([request])
            for start in range(0, len(prompt), size):
                end = min(start + size, len(prompt))
                executor.prefill(slots, [Span(slot, start, end, (slot,) if end == len(prompt) else ())])
            executor.decode(slots, [slot], 11)
            assert news(slots, [slot]) == [whole]


@NAMES
def test_a_prompt_that_is_decoded_token_by_token_leaves_the_same_cache(name: str) -> None:
    """A step rounds its own key and value too, so that it computes what a pass over the prompt does."""
    (prompt,) = prompts(1)
    executor, kept = make(name), []
    for known in (len(prompt), 1):
        slots = executor.allocate(1, 40)
        forced = prompt[known:]
        (slot,) = slots.admit([Request(prompt[:known], GREEDY, 0, 0, 40, forced=forced)])
        executor.prefill(slots, [Span(slot, 0, known, (slot,))])
        executor.decode(slots, [slot], len(forced))
        kept.append([tensor[:, slot, :, : len(prompt)].float() for tensor in slots.cache.tensors])
    for ours, theirs in zip(*kept, strict=True):
        assert differ_by_rounding(ours, theirs)


@NAMES
def test_sequences_come_and_go(name: str) -> None:
    """Beside others that join and leave, in reused slots, the text is the same as alone."""
    llm = LLM(SMALL, device="cpu", executor=name, kv_dtype="int8", max_batch=3)
    asked = prompts(9)
    alone = [llm.generate(prompt, replace(GREEDY, max_tokens=3 + i))[0].token_ids for i, prompt in enumerate(asked)]
    settings = [replace(GREEDY, max_tokens=3 + i) for i in range(len(asked))]
    assert [c.token_ids for c in llm.generate(asked, settings)] == alone
    llm.engine.scheduler.prompt_tokens = 7
    assert [c.token_ids for c in llm.generate(asked, settings)] == alone


@NAMES
def test_prompts_that_begin_alike_share_codes(name: str) -> None:
    llm = LLM(SMALL, device="cpu", executor=name, kv_dtype="int8", max_batch=6)
    shared = [7, 8, 9] * 23
    asked = [shared + more for more in ([1], [2, 3], [4] * 5)]
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in asked]
    assert [c.token_ids for c in llm.generate(asked, GREEDY)] == alone
    several = SamplingParams(temperature=1.0, seed=5, max_tokens=8, n=3)
    found = [c.token_ids for c in llm.generate(shared, several)]
    assert len(set(found)) > 1
    assert found[0] == llm.generate(shared, replace(several, n=1))[0].token_ids


def test_a_broken_row_ends_its_sequence_alone() -> None:
    """A NaN key makes its scale NaN, and so is noticed; it is erased before the slot's next sequence."""
    executor = make("kernels")
    slots = executor.allocate(2, 40)
    lanes = slots.admit([Request(prompt, GREEDY, 0, i, 40) for i, prompt in enumerate(prompts(2, 20))])
    executor.prefill(slots, [Span(slot, 0, len(slots.request(slot).prompt), (slot,)) for slot in lanes])
    assert slots.cache.scales is not None
    slots.cache.scales[1, lanes[0], 2, 0] = torch.nan
    executor.decode(slots, lanes, 3)
    assert slots.not_finite[lanes].tolist() == [True, False]
    slots.erase(lanes[0])
    assert all(tensor[:, lanes[0]].isfinite().all() for tensor in slots.cache.tensors)


def test_ops_are_those_of_codes() -> None:
    rules = PassRules(load(SMALL), kv_codes=True)
    ops = [step.op for step in decode_step(rules, 3, End.DRAWN)]
    assert ops.count("append_attention_int8") == 3
    assert "append_attention" not in ops
    executor = make("kernels")
    run(executor, [Request([1, 2, 3], GREEDY, 0, 0, 6)])
    table = [step.op for step in executor.table("prefill") or ()]
    assert rounded_rows(3) == 8
    assert table.count("quantise_kv") == table.count("prompt_attention_int8") == 3
    assert "prompt_attention" not in table


def test_auto_takes_graph_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The kernels executor replaces graph."""
    monkeypatch.setattr(auto, "GraphExecutor", KernelsExecutor)
    monkeypatch.setattr(auto, "PersistentExecutor", None)  # it is not even created
    with caplog.at_level(logging.INFO, "warpline"):
        executor = create("auto", load(SMALL), CPU, "fp32", INT8)
    (said,) = [record for record in caplog.records if "auto" in record.message]
    assert said.levelno == logging.INFO
    assert said.message == "executor auto → graph: the persistent executor has no kv_dtype='int8'"
    asked = [Request([5, 6], GREEDY, 0, 0, 12)]
    assert run(executor, asked) == run(make("torch"), asked)


@pytest.mark.parametrize("name", ["cpu", "persistent"])
def test_who_cannot_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"the {name} executor has no kv_dtype='int8': use .*--executor torch"):
        create(name, load(SMALL), CPU, "fp32", INT8)
