"""Executors on slots: a sequence does not depend on its neighbours, nor on how its prompt is split."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import make_model, make_weights
from tests.engine.running import news, run, spans
from warpline.config import ModelConfig, SamplingParams
from warpline.engine.crossing import DONE
from warpline.engine.executors import Executor, create
from warpline.engine.executors.pytorch import TorchExecutor
from warpline.engine.request import Request, Span
from warpline.model.quantise import quantised
from warpline.model.weights import Weights

CPU = torch.device("cpu")
CAPACITY = 60
CONFIG = ModelConfig(
    n_layer=3,
    n_head=3,
    n_embd=39,
    n_inner=70,
    vocab_size=101,
    n_positions=64,
    eos_token_id=5,
    activation_function="gelu_new",
)
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
#: Settings that use every stage of sampling.
SETTINGS = [
    GREEDY,
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.3, min_tokens=4),
    SamplingParams(temperature=1.0, top_p=1.0, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, top_p=0.95, frequency_penalty=-0.5, logit_bias={7: 4.0, 5: -100.0, 90: 2.5}),
    SamplingParams(temperature=1.2, top_p=1.0, min_p=0.02, min_tokens=3),
]
EVERY = pytest.mark.parametrize(
    ("name", "dtype"), [("torch", "fp32"), ("cpu", "fp32"), ("cpu", "int8"), ("cpu", "bf16")]
)


@functools.cache
def weights(dtype: str = "fp32", window: int | None = None) -> Weights:
    plain = make_weights(replace(CONFIG, window=window))
    if dtype == "bf16":
        return replace(plain, tensors={name: value.bfloat16() for name, value in plain.tensors.items()})
    return quantised(plain) if dtype == "int8" else plain


@functools.cache
def executor(name: str, dtype: str, window: int | None = None) -> Executor:
    return create(name, weights(dtype, window), CPU, dtype)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(CONFIG.vocab_size) for _ in range(count)]


def requests(rng: random.Random, count: int, *, logprobs: bool = False) -> list[Request]:
    found = []
    for i in range(count):
        length, params = rng.randint(1, 50), rng.choice(SETTINGS)
        if logprobs and rng.random() < 0.2:
            params = replace(params, logprobs=rng.randint(0, 3))
        forced = ids(rng, rng.choice([0, 0, 0, 3]))
        found.append(Request(ids(rng, length), params, i, 0, rng.randint(length + 1, CAPACITY), forced))
    return found


def live(executor: Executor, asked: list[Request], rng: random.Random, count: int) -> list[list[int]]:
    """Return the new tokens of each request, admitted when there is room and run in parts, alone or together."""
    slots = executor.allocate(count, CAPACITY)
    waiting, filled, holder = list(range(len(asked))), dict[int, int](), dict[int, int]()
    found: list[list[int]] = [[] for _ in asked]
    while waiting or holder:
        joining = [waiting.pop(0) for _ in range(rng.randint(0, min(slots.free, len(waiting))))]
        if joining:
            for slot, number in zip(slots.admit([asked[number] for number in joining]), joining, strict=True):
                holder[slot], filled[slot] = number, 0
        parts = []
        for slot, start in filled.items():
            prompt = len(slots.request(slot).prompt)
            if start < prompt and rng.random() < 0.7:
                filled[slot] = end = rng.choice([prompt, rng.randint(start + 1, prompt)])
                parts.append(Span(slot, start, end, (slot,) if end == prompt else ()))
        if parts:
            executor.prefill(slots, parts)
        ready = [slot for slot, end in filled.items() if end == len(slots.request(slot).prompt)]
        if not ready:
            continue
        executor.decode(slots, rng.sample(ready, rng.randint(1, len(ready))), rng.randint(1, 6))
        report = slots.report(ready, CAPACITY).wait()
        for slot, tokens, length, flags in zip(ready, report.tokens, report.counts, report.flags, strict=True):
            found[holder[slot]] += tokens[:length].tolist()
            if flags & DONE:
                slots.release(slot)
                del holder[slot], filled[slot]
    assert slots.free == count
    return found


@EVERY
@pytest.mark.parametrize("window", [None, 7])
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), asked=st.integers(1, 8), room=st.integers(1, 5))
def test_sequences_join_and_leave(name: str, dtype: str, window: int | None, seed: int, asked: int, room: int) -> None:
    its, rng = executor(name, dtype, window), random.Random(seed)
    wanted = requests(rng, asked, logprobs=True)
    assert live(its, wanted, rng, room) == [run(its, [request])[0] for request in wanted]


@pytest.mark.parametrize("window", [None, 1, 20])
def test_both_executors_agree(window: int | None) -> None:
    rng = random.Random(4)
    asked = requests(rng, 40)
    found = [live(executor(name, "fp32", window), asked, rng, 6) for name in ("cpu", "torch")]
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) > 30


@EVERY
@pytest.mark.parametrize("length", [1, 9, 45])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_completions_of_one_prompt_share_its_run(name: str, dtype: str, length: int, logprobs: int | None) -> None:
    """The first tokens come from the same logits, with settings and noise of their own, beside another prompt."""
    its, rng = executor(name, dtype), random.Random(length)
    prompt = ids(rng, length)
    asked = [Request(ids(rng, 12), GREEDY, 9, 0, 30)]
    asked += [Request(prompt, replace(p, logprobs=logprobs), 1, i, length + 12) for i, p in enumerate(SETTINGS)]
    slots = its.allocate(len(asked) + 1, CAPACITY)
    other, *lanes = slots.admit(asked)
    source = lanes[2]
    its.prefill(slots, [*spans(slots, [other]), Span(source, 0, length, (source, *lanes[:2], *lanes[3:]))])
    targets = [slot for slot in lanes if slot != source]
    slots.copy(source, targets, length)
    its.decode(slots, [*lanes, other], 25)
    assert news(slots, [other, *lanes]) == [run(its, [request])[0] for request in asked]


@EVERY
@pytest.mark.parametrize("cuts", [[1], [1, 2, 3], [20], [39], [33, 34], [5, 36]])
def test_a_prompt_in_parts(name: str, dtype: str, cuts: list[int]) -> None:
    its, request = executor(name, dtype), Request(ids(random.Random(1), 40), GREEDY, 0, 0, 55)
    slots = its.allocate(3, CAPACITY)
    slot = slots.admit([request] * 2)[1]
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        its.prefill(slots, [Span(slot, start, end, (slot,) if end == 40 else ())])
        assert int(slots.length[slot]) == 40 + (end == 40)
    its.decode(slots, [slot], 14)
    assert news(slots, [slot]) == run(its, [request])


@EVERY
@pytest.mark.parametrize(("common", "own"), [(1, 1), (7, 30), (35, 2)])
def test_a_prompt_goes_on_behind_what_another_began(name: str, dtype: str, common: int, own: int) -> None:
    its, rng = executor(name, dtype), random.Random(common)
    shared = ids(rng, common)
    asked = [Request(shared + ids(rng, own + i), GREEDY, 0, i, 55) for i in range(3)]
    slots = its.allocate(3, CAPACITY)
    first, *others = slots.admit(asked)
    its.prefill(slots, spans(slots, [first]))
    slots.copy(first, others, common)
    its.prefill(slots, [Span(slot, common, len(slots.request(slot).prompt), (slot,)) for slot in others])
    its.decode(slots, [first, *others], 54)
    assert news(slots, [first, *others]) == [run(its, [request])[0] for request in asked]


@pytest.mark.parametrize("name", ["torch", "cpu"])
@torch.no_grad()
def test_logprobs_of_given_tokens(name: str) -> None:
    """They equal those of the model without a cache; the sequence beside it requests none."""
    its, rng, model = executor(name, "fp32"), random.Random(8), make_model(weights())
    params = SamplingParams(temperature=0, ignore_eos=True, logprobs=4)
    asked = [Request(ids(rng, 9), params, 0, 0, 30, ids(rng, 21)), Request(ids(rng, 33), GREEDY, 0, 0, 50)]
    asked += [Request(ids(rng, 1), replace(params, logprobs=0), 0, 0, 20, ids(rng, 12))]
    slots = its.allocate(4, CAPACITY)
    lanes = slots.admit(asked)[::-1]
    its.prefill(slots, spans(slots, lanes))
    its.decode(slots, lanes, 30)
    found = slots.report(lanes, CAPACITY).wait()
    assert set(found.logprobs) == {lanes[0], lanes[2]}
    for row, slot in ((0, lanes[0]), (2, lanes[2])):
        request, noted = slots.request(slot), found.logprobs[slot]
        new, start = found.tokens[row, : found.counts[row]], len(request.prompt)
        assert new[: len(request.forced)].tolist() == list(request.forced)
        text = torch.tensor([[*request.prompt, *new.tolist()]])
        expected = model(text[:, :-1])[0].log_softmax(dim=-1)[start - 1 :]
        places = slice(start, start + len(new))
        torch.testing.assert_close(
            torch.from_numpy(noted.logprob[places]),
            expected.gather(1, text[0, start:, None])[:, 0],
            atol=1e-4,
            rtol=1e-4,
        )
        values, tokens = expected.topk(4, dim=-1)
        torch.testing.assert_close(torch.from_numpy(noted.top_logprob[places]), values, atol=1e-4, rtol=1e-4)
        assert noted.top_token[places].tolist() == tokens.tolist()


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_every_step_is_seen_while_it_is_traced(name: str) -> None:
    its, request, seen = executor(name, "fp32"), Request([1, 2, 3], GREEDY, 0, 0, 12), list[tuple[str, int]]()
    expected, slots = run(its, [request]), its.allocate(2, CAPACITY)
    lanes = slots.admit([request])
    with its.trace(lambda phase: seen.append((phase, int(slots.length[0])))):
        its.prefill(slots, spans(slots, lanes))
        its.decode(slots, lanes, 3)
    assert seen == [("prefill", 3), ("decode", 4), ("decode", 5), ("decode", 6)]
    its.decode(slots, lanes, 5)
    assert len(seen) == 4
    assert news(slots, lanes) == expected


@pytest.mark.parametrize("name", ["torch", "cpu"])
@torch.no_grad()
def test_what_a_step_computed_is_shown_lane_by_lane(name: str) -> None:
    its, rng, model = executor(name, "fp32"), random.Random(5), make_model(weights())
    asked = [Request(ids(rng, length), GREEDY, 0, 0, 50) for length in (4, 30, 11)]
    slots = its.allocate(3, CAPACITY)
    slots.admit(asked)
    its.prefill(slots, spans(slots, [0, 1, 2]))
    shown = its.observe(slots, [2, 0])
    assert slots.length[:3].tolist() == [6, 31, 13]
    for row, slot in enumerate((2, 0)):
        before = slots.tokens[slot, : int(slots.length[slot]) - 1]
        torch.testing.assert_close(shown["logits"][row], model(before[None])[0, -1], atol=1e-4, rtol=1e-4)
    assert all(len(value) == 2 for value in shown.values())


def test_a_compiled_model_in_the_torch_executor() -> None:
    its = create("torch", weights(), CPU, "fp32")
    assert isinstance(its, TorchExecutor)
    its.model = torch.compile(its.model, backend="eager", dynamic=True)  # type: ignore[assignment]
    asked = requests(random.Random(2), 5)
    expected = [run(executor("torch", "fp32"), [request])[0] for request in asked]
    assert run(its, asked) == expected
    assert live(its, asked, random.Random(2), 3) == expected
