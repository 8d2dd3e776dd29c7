"""Many prompts and many tokens: the oracle's tokens in fp32 whatever the batch, and a million tokens without a leak."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.test_persistent import GPU, GREEDY, run
from warpline.bench.oracle import Oracle
from warpline.engine.executor import create
from warpline.engine.state import Request
from warpline.model.weights import Weights, load

PROMPTS, NEW = 50, 200


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.backends.cuda.matmul.allow_tf32 = False
    return load("random:gpt2", device="cuda")


@pytest.fixture(scope="module")
def asked(weights: Weights) -> list[Request]:
    rng = random.Random(50)
    prompts = [[rng.randrange(weights.config.vocab_size) for _ in range(rng.randint(1, 60))] for _ in range(PROMPTS)]
    return [Request(prompt, GREEDY, 0, i, len(prompt) + NEW) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(weights: Weights, asked: list[Request]) -> list[list[int]]:
    return run(create("torch", weights, GPU, "fp32"), asked)[0]


@pytest.mark.parametrize(
    ("name", "batch"),
    [("kernels", 50), ("graph", 1), ("graph", 8), ("graph", 50), ("persistent", 1), ("persistent", 4)],
)
def test_fifty_prompts_of_200_tokens(
    name: str, batch: int, weights: Weights, asked: list[Request], expected: list[list[int]]
) -> None:
    executor, found = create(name, weights, GPU, "fp32"), []
    for first in range(0, PROMPTS, batch):
        found += run(executor, asked[first : first + batch])[0]
    different = [i for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs]
    assert len(different) <= 2, "only where the two likeliest tokens tie to the last bits may they differ"
    for i in different:
        ids, length = torch.tensor([found[i]], device=GPU), len(asked[i].prompt)
        assert Oracle(weights).judge(ids[:, :length], ids[:, length:], "fp32").right


@pytest.mark.parametrize(("name", "batch", "new", "rounds"), [("persistent", 8, 1000, 63), ("graph", 64, 500, 16)])
def test_half_a_million_tokens_each(name: str, batch: int, new: int, rounds: int) -> None:
    """The same every time, all of them numbers, in memory that does not grow."""
    weights = load("random:gpt2", dtype="fp16", device="cuda")
    executor = create(name, weights, GPU, "fp16")
    rng = random.Random(1)
    prompts = [[rng.randrange(weights.config.vocab_size) for _ in range(16)] for _ in range(batch)]
    state = executor.allocate(batch, 16 + new)
    first, used = None, 0
    for i in range(rounds):
        state.begin([Request(prompt, GREEDY, 0, i, 16 + new) for i, prompt in enumerate(prompts)])
        executor.prefill(state)
        for _ in range(0, new - 1, 100):
            executor.decode(state, 100)
        torch.cuda.synchronize()
        executor.check()
        assert not state.broken.any()
        assert state.length.tolist() == [16 + new] * batch
        first = state.tokens.clone() if first is None else first
        assert torch.equal(state.tokens, first)
        if i == 3:
            used = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= used
