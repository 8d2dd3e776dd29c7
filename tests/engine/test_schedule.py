"""The schedule of a decode step, run by the ops' references: the torch executor's tokens, on any machine."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SMALL, make_weights
from tests.engine.running import run
from warpline import LLM, SamplingParams
from warpline.engine.executors import create
from warpline.engine.executors.graph import prompts as passes
from warpline.engine.executors.graph import schedule
from warpline.engine.executors.graph.kernels import KernelsExecutor
from warpline.engine.executors.graph.schedule import (
    End,
    PassRules,
    block_parameters,
    buffers,
    decode_step,
    head_parameters,
)
from warpline.engine.request import Request, Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError
from warpline.model.weights import load

CPU = torch.device("cpu")


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(50257) for _ in range(rng.randint(1, 30))] for _ in range(count)]


@pytest.fixture(scope="module")
def pair() -> tuple[LLM, LLM]:
    return LLM(SMALL, device="cpu", executor="kernels"), LLM(SMALL, device="cpu", executor="torch")


@pytest.mark.parametrize("count", [1, 3, 8, 9])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=12, seed=4, top_k=30),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3, logprobs=2),
    ],
)
def test_tokens_equal_torchs(pair: tuple[LLM, LLM], count: int, params: SamplingParams) -> None:
    ours, theirs = pair
    found = [c.token_ids for c in ours.generate(prompts(count), params)]
    assert found == [c.token_ids for c in theirs.generate(prompts(count), params)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.5, max_tokens=6, seed=4, top_p=1.0),
        SamplingParams(temperature=1.5, max_tokens=6, seed=5, top_k=40, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=6, logprobs=2),
    ],
)
def test_a_padded_vocabulary_changes_nothing(pair: tuple[LLM, LLM], params: SamplingParams) -> None:
    assert decode_step(PassRules(load(SMALL)), 10, End.DRAWN)[-3].inputs[1] == "padded_head.weight"
    found, expected = (llm.generate(prompts(10), params) for llm in pair)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    if params.logprobs is not None:
        values = [[t.logprob for c in completions for t in c.logprobs or ()] for completions in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=16 * 2**-24)  # float32 sums in another order


@pytest.mark.parametrize("batch", [9, 30])
def test_tokens_where_products_standardise_their_rows(
    pair: tuple[LLM, LLM], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "suits", lambda *_, **__: True)
    ours, params = LLM(SMALL, device="cpu", executor="kernels"), SamplingParams(temperature=0, max_tokens=9)
    ops = {step.op for step in decode_step(PassRules(load(SMALL)), batch, End.LIKELIEST)}
    assert {"row_statistics", "standard_matmul_bias", "standard_matmul_bias_gelu", "group_matmul_bias_residual"} <= ops
    assert ops.isdisjoint({"residual_layernorm", "matmul_bias_gelu"})
    found, expected = (llm.generate(prompts(batch), params) for llm in (ours, pair[1]))
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_window_and_end_of_text() -> None:
    weights = load(SMALL)
    weights = replace(weights, config=replace(weights.config, window=5))

    def written(name: str, eos: int | None) -> list[list[int]]:
        changed = replace(weights, config=replace(weights.config, eos_token_id=eos))
        params = SamplingParams(temperature=0, max_tokens=30)
        return run(create(name, changed, CPU, "fp32"), [Request(p, params, 0, i, 45) for i, p in enumerate(prompts(2))])

    free = written("torch", None)
    assert written("kernels", None) == free
    eos = free[0][-6]
    assert written("kernels", eos) == written("torch", eos)


@pytest.mark.parametrize(("dtype", "codes"), [("fp32", False), ("fp32", True), ("int8", False)])
@pytest.mark.parametrize(("batch", "at_once"), [(1, False), (8, False), (9, False), (9, True)])
def test_every_name_is_somebodys(
    batch: int, at_once: bool, dtype: str, codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step reads is a parameter, state, or written before; what it writes has a buffer."""
    monkeypatch.setattr(schedule, "suits", lambda *_, **__: at_once)
    weights = load(SMALL, dtype=dtype)
    rules = PassRules(weights, kv_codes=codes)
    slots = Slots(weights.config, batch, 20, device=CPU, dtype=torch.int8 if codes else torch.float32)
    named = buffers(rules, slots, slots.crossing.select(range(batch), batch))
    parameters = {**block_parameters(rules, batch), **head_parameters(rules, batch)}
    for end in (End.LIKELIEST, End.DRAWN):
        written: set[int] = set()
        for step in decode_step(rules, batch, end):
            spec = step.spec
            dims = spec.dims_of([named[name].shape for name in step.inputs])
            for buffer, name in zip(spec.outputs, step.outputs, strict=True):
                assert tuple(named[name].shape) == buffer.shape(dims), (step.op, name)
                written.add(named[name].untyped_storage().data_ptr())
            for name in step.inputs:
                fixed = name in parameters or name == "lanes" or hasattr(slots, name) or ".cache_" in name
                assert fixed or named[name].untyped_storage().data_ptr() in written, (step.op, name)


@pytest.mark.parametrize("exists", [False, True])
def test_an_invariant_step_has_the_same_ops_for_any_rows(exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "suits", lambda *_, **__: exists)
    rules = PassRules(load(SMALL), invariant=True)
    one, *others = ([step.op for step in decode_step(rules, n, rules.end(n, likeliest=True))] for n in (1, 2, 9, 200))
    assert all(ops == one for ops in others)
    assert ("standard_matmul_bias" in one) is exists
    assert "head_argmax" not in one


def test_it_cannot_run_every_model() -> None:
    weights = load("random:n_layer=1,n_head=2,n_embd=32,n_positions=16,activation_function=relu")
    with pytest.raises(ConfigError, match="relu"):
        create("kernels", weights, CPU, "fp32")


def test_slots_go_when_nothing_holds_them() -> None:
    """Executors keep data for slots without holding the slots: the next ones may need the memory at once."""
    for name in ("kernels", "torch", "cpu"):
        executor = create(name, load(SMALL), torch.device("cpu"), "fp32")
        slots = executor.allocate(1, 16)
        lanes = slots.admit([Request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4), 0, 0, 7)])
        executor.prefill(slots, [Span(lanes[0], 0, 3, tuple(lanes))])
        executor.decode(slots, lanes, 2)
        gone = weakref.ref(slots)
        gc.disable()
        try:
            del slots
            assert gone() is None, name
        finally:
            gc.enable()


def test_passes_over_prompts_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "LEAST_SHARED", 16)
    weights = load(SMALL)
    ours, theirs = KernelsExecutor(weights, CPU, "fp32"), create("torch", weights, CPU, "fp32")
    slots = [executor.allocate(2, 60) for executor in (ours, theirs)]
    rng = random.Random(1)
    for length in (8, 16, 30, 8, 50, 8, 16):
        requests = [Request([rng.randrange(9) for _ in range(length)], SamplingParams(temperature=0), 0, 0, 60)]
        written = [run(e, requests, slots=s) for e, s in zip((ours, theirs), slots, strict=True)]
        assert written[0] == written[1]
    assert {rows for rows, *_ in ours.prompts._passes[slots[0]]} == {8, 16, 32, 64}
    memory = ours.prompts._memory[slots[0]]
    assert set(memory._rooms) == {16, 32, 64}
    assert set(memory._ends) == {1}


@given(rows=st.integers(1, 40_000), count=st.integers(1, 700))
def test_passes_have_room(rows: int, count: int) -> None:
    assert rows <= passes.rounded_rows(rows) <= max(8, 2 * rows)
    assert rows <= 1024 or passes.rounded_rows(rows) <= 1.25 * rows
    assert count <= passes.rounded_sequences(count) <= max(8, 8 * count if count < 9 else count + 63)
    assert len({passes.rounded_rows(n) for n in range(1, 16_385)}) < 40


@given(count=st.integers(1, 400))
def test_graphs_of_a_pass_grow_and_are_the_whole_pass(count: int) -> None:
    launches = [lambda i=i: i for i in range(count)]
    parts = passes.growing(launches)
    assert [launch() for part in parts for launch in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes)
    assert len(parts) == 1 or sizes[0] == passes.FIRST_PART


def test_attention_is_scaled_by_its_layer() -> None:
    """Some checkpoints need it: each layer has its own scale, in prompts and in steps."""
    config = load(SMALL).config  # weights large enough for a scale to show
    weights = make_weights(replace(config, scale_attn_by_inverse_layer_idx=True))
    asked = [Request(p, SamplingParams(temperature=0), 0, i, 40) for i, p in enumerate(prompts(2))]
    assert len({weights.config.attention_scale(layer) for layer in range(3)}) == 3
    assert run(create("kernels", weights, CPU, "fp32"), asked) == run(create("torch", weights, CPU, "fp32"), asked)
