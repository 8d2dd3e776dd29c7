"""The kernels and graph executors on a GPU: the torch executor's tokens in fp32, right tokens in half precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL
from tests.gpu.test_persistent import GPU, requests, run
from warpline import LLM, SamplingParams
from warpline.bench.oracle import Oracle
from warpline.config import SamplingParams as Params
from warpline.engine.executors import create
from warpline.engine.executors.graph.bind import MOST_OWN_ROWS
from warpline.model.weights import load

NAMES = pytest.mark.parametrize("name", ["kernels", "graph", "auto"])


@NAMES
@pytest.mark.parametrize("lengths", [[1], [9], [5, 40, 17], list(range(1, 9)), list(range(1, 10)), [7] * 64])
def test_fp32_tokens_equal_torchs(name: str, lengths: list[int]) -> None:
    weights = load(SMALL, device="cuda")
    asked = requests(weights, lengths, 24)
    expected = run(create("torch", weights, GPU, "fp32"), asked)
    ours = create(name, weights, GPU, "fp32")
    assert run(ours, asked) == expected
    assert run(ours, asked, chunk=5) == expected


@NAMES
@pytest.mark.parametrize(("lengths", "new"), [([16], 60), ([900], 60), ([300] * 9, 30)])
def test_fp32_tokens_of_gpt2(name: str, lengths: list[int], new: int) -> None:
    weights = load("random:gpt2", device="cuda")
    asked = requests(weights, lengths, new)
    assert run(create(name, weights, GPU, "fp32"), asked) == run(create("torch", weights, GPU, "fp32"), asked)


@NAMES
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("batch", [1, 8, 32, 100, 160])
def test_half_precision_is_judged_right(name: str, dtype: str, batch: int) -> None:
    weights = load("random:gpt2", dtype=dtype, device="cuda")
    asked = requests(weights, [30] * batch, 30)
    executor = create(name, weights, GPU, dtype)
    found = run(executor, asked)
    ids = torch.tensor(found, device=GPU)
    assert Oracle(weights).judge(ids[:, :30], ids[:, 30:], dtype).right
    assert run(executor, asked) == found


@NAMES
@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0.8, ignore_eos=True),
        Params(temperature=1, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
        Params(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
        Params(temperature=1, top_p=0.9, frequency_penalty=-1, logit_bias={0: 3.0, 7: -100.0, 20: 5.0}),
        Params(temperature=0, min_tokens=10, logprobs=3),
    ],
)
def test_sampling_draws_what_torch_draws(name: str, params: Params) -> None:
    weights = load(SMALL, device="cuda")
    asked = requests(weights, [8, 20], 40, params)
    assert run(create(name, weights, GPU, "fp32"), asked) == run(create("torch", weights, GPU, "fp32"), asked)


@NAMES
def test_window(name: str) -> None:
    weights = load(SMALL, device="cuda")
    weights = replace(weights, config=replace(weights.config, window=7))
    asked = requests(weights, [30, 50], 40)
    assert run(create(name, weights, GPU, "fp32"), asked) == run(create("torch", weights, GPU, "fp32"), asked)


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0, ignore_eos=True),
        Params(temperature=0.9, top_p=1.0),
        Params(temperature=1, top_k=40, top_p=0.9, repetition_penalty=1.2),
        Params(temperature=0, logprobs=2),
        Params(temperature=0, presence_penalty=1.5, frequency_penalty=0.5, logit_bias={9: 1.0, 2: -100.0}),
    ],
)
def test_a_library_computes_the_logits_of_many(params: Params) -> None:
    weights = load(SMALL, device="cuda")
    asked = requests(weights, [3 + i % 5 for i in range(MOST_OWN_ROWS + 2)], 12, params)
    found = run(create("graph", weights, GPU, "fp32"), asked)
    assert found == run(create("torch", weights, GPU, "fp32"), asked)


@NAMES
def test_slots_serve_any_number(name: str) -> None:
    llm = LLM(SMALL, device="cuda", dtype="fp32", executor=name)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[i, i + 1] for i in range(40)]
    many = [c.token_ids for c in llm.generate(prompts, params)]
    assert many[:5] == [llm.generate(prompt, params)[0].token_ids for prompt in prompts[:5]]
    longer = replace(params, max_tokens=60)
    assert llm.generate(prompts[0], longer)[0].token_ids[:8] == many[0]
