"""int8 weights by our kernels' references: the table lists what runs; tokens are those of dequantised weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL
from tests.engine.running import run
from warpline import LLM, SamplingParams, hardware
from warpline.engine.device import dtype_of
from warpline.engine.executors import create, resolve
from warpline.engine.executors.graph import bind as binding
from warpline.engine.executors.graph import schedule
from warpline.engine.executors.graph.forms import EXPANDED, expanded, padded_head
from warpline.engine.executors.graph.schedule import End, OpCall, PassRules, buffers, decode_step, on_memory
from warpline.engine.request import Request
from warpline.engine.slots import Slots
from warpline.errors import DeviceError
from warpline.model.weights import Weights, load

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
ODD = "random:n_layer=2,n_head=3,n_embd=51,n_positions=64,vocab_size=131,tie_word_embeddings=false"


def asked(weights: Weights, lengths: list[int], new: int, params: SamplingParams = GREEDY) -> list[Request]:
    rng = random.Random(len(lengths))
    vocab = weights.config.vocab_size
    return [Request([rng.randrange(vocab) for _ in range(n)], params, 3, i, n + new) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("model", [SMALL, ODD])
@pytest.mark.parametrize("lengths", [[1], [9], [5, 20, 17], list(range(1, 9)), list(range(1, 10)), [3] * 20])
def test_tokens_are_those_of_the_numbers(model: str, lengths: list[int]) -> None:
    weights = load(model, dtype="int8")
    requests = asked(weights, lengths, 12)
    expected = run(create("torch", weights, CPU, "int8"), requests)
    assert run(create("kernels", weights, CPU, "int8"), requests) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=4, top_k=30),
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2),
        SamplingParams(temperature=0, presence_penalty=1.5, logit_bias={9: 1.0, 2: -100.0}),
    ],
)
@pytest.mark.parametrize("count", [2, 10])
def test_draws_are_those_of_the_numbers(params: SamplingParams, count: int) -> None:
    weights = load(SMALL, dtype="int8")
    weights = replace(weights, config=replace(weights.config, window=7))
    requests = asked(weights, [8] * count, 10, params)
    expected = run(create("torch", weights, CPU, "int8"), requests)
    assert run(create("kernels", weights, CPU, "int8"), requests) == expected


def test_prompts_in_chunks_change_nothing() -> None:
    prompts = [list(range(3, 60)), [7, 8, 9], list(range(20, 45))]
    found = []
    for most in (4096, 16):
        llm = LLM(SMALL, device="cpu", dtype="int8", executor="kernels", max_batch=4)
        llm.executor.prompt_tokens = most
        found.append([c.token_ids for c in llm.generate(prompts, replace(GREEDY, max_tokens=9))])
    assert found[0] == found[1]


def rules_of(*, invariant: bool = False) -> PassRules:
    return PassRules(load(SMALL, dtype="int8"), invariant=invariant)


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_read_codes(rows: int) -> None:
    rules = rules_of()
    steps = decode_step(rules, rows, End.LIKELIEST)
    products = [step for step in steps if "matvec" in step.op or "head" in step.op or "embedding" in step.op]
    assert len(products) == 4 * rules.weights.config.n_layer + 2
    for step in products:
        assert step.op.endswith("_int8")
        at = next(i for i, name in enumerate(step.inputs) if name.endswith(".scale"))
        assert step.inputs[at] == f"{step.inputs[at - 1]}.scale"
    assert not {"expand", "matvec", "matmul_bias"} & {step.op for step in steps}
    assert decode_step(rules, rows, End.DRAWN)[-3].op == "matvec_int8"


def expansions(steps: list[OpCall]) -> list[str]:
    """Return what is expanded, in order; only the next op reads each expansion."""
    found = []
    for step, following in itertools.pairwise(steps):
        plain = [name for name in following.inputs if name.endswith(EXPANDED) or name == "padded_head.weight"]
        assert (step.op == "expand") == bool(plain)
        if plain:
            assert step.inputs[1] == f"{step.inputs[0]}.scale"
            assert step.outputs[0].removesuffix(EXPANDED) == plain[0].removesuffix(EXPANDED).removesuffix(".weight")
            found.append(step.inputs[0])
    return found


def test_many_rows_read_numbers_that_an_op_ahead_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "suits", lambda *_, **__: True)  # copies of all matrices are not wanted
    steps = decode_step(rules_of(), 9, End.DRAWN)
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert expansions(steps) == [f"h.{i}.{part}.weight" for i in range(3) for part in parts] + ["wte.weight"]
    assert not [step.op for step in steps if "group" in step.op or "standard" in step.op]


def test_an_invariant_step_has_the_same_ops_for_any_rows() -> None:
    rules = rules_of(invariant=True)
    one, *others = ([step.op for step in decode_step(rules, n, rules.end(n, likeliest=True))] for n in (1, 9, 200))
    assert all(ops == one for ops in others)


def test_matrices_are_expanded_into_the_same_memory() -> None:
    weights = load(SMALL, dtype="int8")
    rooms = [*expanded(weights).values(), *(t for name, t in padded_head(weights).items() if "bias" not in name)]
    assert len({room.untyped_storage().data_ptr() for room in rooms}) == 1
    largest = max(room.numel() for room in rooms)
    assert rooms[0].untyped_storage().nbytes() == largest * weights.activations.itemsize
    padded = padded_head(weights)
    assert padded["padded_head.weight"].shape == (50304, 64)
    assert padded["padded_head.bias"].isinf().sum() == 50304 - 50257


@pytest.mark.parametrize("rows", [1, 9])
def test_no_op_begins_before_its_weights_are_there(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping: list[bool] = []

    def recorded(_op: object, overlaps: bool, _invariant: bool) -> Callable[[], None]:
        overlapping.append(overlaps)
        return lambda: None

    monkeypatch.setattr(binding, "_bind", recorded)
    rules = rules_of()
    slots = Slots(rules.weights.config, rows, 20, device=CPU, dtype=torch.float32)
    steps = decode_step(rules, rows, End.DRAWN)
    binding.bind(on_memory(steps, buffers(rules, slots, slots.crossing.select(range(rows), rows))), overlapping=True)
    behind = [i > 0 and steps[i - 1].op == "expand" for i in range(len(steps))]
    assert overlapping == [not waits for waits in behind]


def test_who_takes_int8() -> None:
    weights = load(SMALL, dtype="int8")
    assert resolve("graph", torch.device("cuda:0"), weights.config, "int8") == "graph"
    with pytest.raises(DeviceError, match="the persistent executor runs on a CUDA GPU: use --executor cpu here"):
        create("persistent", weights, CPU, "int8")


def test_a_stored_model_is_int8_everywhere() -> None:
    for kind in ("cpu", "cuda"):
        device = hardware.Device(kind=kind, name="a device")
        assert dtype_of("auto", device, "int8") == "int8"
        assert dtype_of("auto", device, None) == {"cpu": "fp32", "cuda": "fp16"}[kind]
        assert dtype_of("fp16", device, "int8") == "fp16"
