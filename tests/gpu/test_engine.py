"""The engine on a GPU: sequences that join and leave, threads, and several engines in one process."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.conftest import make_weights
from tests.engine.arrivals import Alone, Arrival, check_alone, random_params, run_arrivals
from tests.engine.test_threads import in_threads
from warpline import LLM, Completion, SamplingParams
from warpline.bench.oracle import Oracle
from warpline.config import ModelConfig
from warpline.model.weights import load

CONFIG = ModelConfig(n_layer=3, n_head=4, n_embd=256, n_positions=256, vocab_size=2000)
NAMES = pytest.mark.parametrize("name", ["auto", "graph", "persistent", "kernels", "torch"])


@pytest.fixture(scope="module", autouse=True)
def full_fp32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def make(name: str, device: str = "cuda:0", max_batch: int | None = None) -> LLM:
    """Return a model with clear choices."""
    weights = make_weights(CONFIG)
    there = replace(weights, tensors={key: tensor.to(device) for key, tensor in weights.tensors.items()})
    return LLM.of(there, torch.device(device), "fp32", executor=name, max_batch=max_batch)


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(make("torch", "cpu"))


@NAMES
@pytest.mark.parametrize("budget", [64, 16384])
def test_random_arrivals(name: str, budget: int, alone: Alone) -> None:
    """300 requests with any settings, stops and cancellations, prompts in chunks or whole: each equals itself alone."""
    llm = make(name, max_batch=20)
    llm.engine.scheduler.prompt_tokens = budget
    arrivals = run_arrivals(llm, 300, seed=budget, longest=200)
    assert check_alone(alone, arrivals) <= 1  # two tokens may have exactly equal logits


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_judged_right(dtype: str) -> None:
    weights = load("random:gpt2", dtype=dtype, device="cuda")
    llm, oracle = LLM.of(weights, torch.device("cuda:0"), dtype, max_batch=24), Oracle(weights)
    judged = [a for a in run_arrivals(llm, 100, seed=1, longest=300, sampled=False) if not a.cancelled]
    assert len(judged) > 50
    for arrival in judged:
        assert _right(oracle, arrival, dtype)


def _right(oracle: Oracle, arrival: Arrival, dtype: str) -> bool:
    prompt = torch.tensor([arrival.prompt], device="cuda")
    tokens = torch.tensor([arrival.handle.result().token_ids], device="cuda")
    return bool(oracle.judge(prompt, tokens, dtype).right)


@pytest.mark.parametrize("name", ["auto", "graph", "persistent"])
def test_eight_threads_of_200_requests(name: str, alone: Alone) -> None:
    """Their sizes make new graphs and programs all the time, while others are running."""
    llm = make(name, max_batch=48)
    found: list[tuple[list[int], SamplingParams, Completion]] = []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        done = 0
        while done < 200:
            prompts = [[rng.randrange(2000) for _ in range(rng.randint(1, 150))] for _ in range(rng.randint(1, 20))]
            params = [random_params(rng, longest=30) for _ in prompts]
            ways = [llm.generate, lambda p, q: [h.result(timeout=120) for h in map(llm.submit, p, q)]]
            completions = rng.choice(ways)(prompts, params)
            found.extend(zip(prompts, params, completions, strict=True))
            done += len(prompts)

    in_threads(8, work, timeout=300)
    sample = random.Random(9).sample(found, 150)
    assert sum(alone.complete(p, q).token_ids != completion.token_ids for p, q, completion in sample) <= 1
    assert llm.engine.free == llm.max_batch


def test_three_engines_in_three_threads() -> None:
    """On one GPU, in one process, each with its own captures and programs."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[(7 * i + j) % 2000 for j in range(1 + 3 * i)] for i in range(30)]
    expected = [c.token_ids for c in make("torch").generate(prompts, params)]
    llms = [make(name) for name in ("persistent", "graph", "auto")]

    def work(i: int) -> None:
        for _ in range(10):
            for size in (1, 3, 8, 30):
                found = [c.token_ids for c in llms[i].generate(prompts[:size], params)]
                assert found == expected[:size], llms[i].executor.name

    in_threads(3, work, timeout=200)


def test_a_row_that_joins_compiles_and_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy sequences run; then others join that sample, filter and penalise."""
    from warpline.engine.executors.graph import kernels

    llm = make("graph", max_batch=32)
    greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.generate([[i] for i in range(16)], greedy)
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    llm.generate([[i] for i in range(13)], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1))
    monkeypatch.setattr(kernels, "buffers", lambda *_: pytest.fail("a step was bound anew"))
    handles = [llm.submit([i], greedy) for i in range(13)]
    llm.engine.step()
    drawn = SamplingParams(
        temperature=1.0, top_k=5, top_p=0.9, repetition_penalty=1.2, max_tokens=9, logprobs=2, ignore_eos=True
    )
    handles += [llm.submit([i], drawn) for i in range(3)]
    while llm.engine.step():
        pass
    assert all(handle.result().finish_reason == "length" for handle in handles)
