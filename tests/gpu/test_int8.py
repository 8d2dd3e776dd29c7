"""int8 weights on a GPU: tokens are judged by the dequantised weights, so that only rounding is left."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import make_weights
from tests.gpu.test_persistent import GPU, requests, run
from warpline import LLM, SamplingParams
from warpline.bench.oracle import Oracle
from warpline.config import ModelConfig
from warpline.engine.check.diff import compare, first_dependence
from warpline.engine.executors import create
from warpline.engine.executors.graph.executor import GraphExecutor
from warpline.engine.executors.graph.forms import padded_head
from warpline.model.export import export
from warpline.model.quantise import SCALE, quantised
from warpline.model.weights import Weights, load

NAMES = pytest.mark.parametrize("name", ["kernels", "graph", "persistent", "auto"])
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def gpt2() -> Weights:
    return load("random:gpt2", dtype="int8", device="cuda")


def judged(weights: Weights, name: str, lengths: list[int], new: int) -> None:
    """Judge runs of equal lengths together; a second run changes no bit."""
    executor = create(name, weights, GPU, "int8")
    asked = requests(weights, lengths, new)
    found = run(executor, asked)
    assert run(executor, asked) == found
    oracle = Oracle(weights)
    for length in set(lengths):
        ids = torch.tensor([row for row, n in zip(found, lengths, strict=True) if n == length], device=GPU)
        verdict = oracle.judge(ids[:, :length], ids[:, length:], "int8")
        assert verdict.right, (length, verdict)


@NAMES
@pytest.mark.parametrize("batch", [1, 2, 8, 9, 64, 160])
def test_tokens_are_judged_right(gpt2: Weights, name: str, batch: int) -> None:
    if name == "persistent" and batch > 8:
        pytest.skip("persistent has up to 8 sequences at once")
    judged(gpt2, name, [30] * batch, 30)


@pytest.mark.parametrize("lengths", [[1], [8], [9], [900], [200] * 9, [3, 40, 3, 40, 200]])
def test_prompts_are_judged_right(gpt2: Weights, lengths: list[int]) -> None:
    judged(gpt2, "graph", lengths, 20)


@pytest.mark.parametrize(("name", "batch"), [("graph", 1), ("graph", 20), ("persistent", 1), ("persistent", 2)])
@pytest.mark.parametrize(
    "model",
    [
        "random:gpt2-xl,n_layer=2",
        "random:gpt2,n_layer=2,tie_word_embeddings=false",
        "random:n_layer=3,n_head=3,n_embd=144,n_positions=128,vocab_size=777,n_inner=400",
    ],
)
def test_other_models(model: str, name: str, batch: int) -> None:
    judged(load(model, dtype="int8", device="cuda"), name, [17] * batch, 20)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, top_p=0.9), SamplingParams(logprobs=2)])
def test_the_persistent_kernel_repeats_to_the_bit(gpt2: Weights, params: SamplingParams) -> None:
    executor = create("persistent", gpt2, GPU, "int8")
    asked = requests(gpt2, [5, 300, 40], 60, params)
    assert run(executor, asked) == run(executor, asked, chunk=7)


@pytest.mark.parametrize("batch", [1, 5, 12])
def test_widths_that_are_no_whole_vectors_and_rows_of_zeros(batch: int) -> None:
    config = ModelConfig(n_layer=2, n_head=3, n_embd=72, n_positions=64, vocab_size=131)
    plain = make_weights(config)
    plain.tensors["h.0.mlp.c_fc.weight"][5] = 0
    plain.tensors["h.1.attn.c_attn.weight"][-7:] = 0
    on_gpu = replace(plain, tensors={name: value.to(GPU) for name, value in plain.tensors.items()})
    judged(quantised(on_gpu), "graph", [9] * batch, 20)


def test_a_graph_is_its_kernels(gpt2: Weights) -> None:
    """Equal to the bit: overlapping launches read no weight before it is there."""
    for lengths in ([5], [11] * 8, [11] * 9, [40] * 64):
        asked = requests(gpt2, lengths, 24)
        graph = create("graph", gpt2, GPU, "int8")
        assert run(graph, asked, chunk=5) == run(create("kernels", gpt2, GPU, "int8"), asked)
        assert isinstance(graph, GraphExecutor)
        table = graph.table("decode")
        assert table is not None
        assert ("expand" in {step.op for step in table}) == (len(lengths) > 8)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_what_steps_compute_is_torchs(gpt2: Weights, count: int) -> None:
    """Values agree up to rounding in half precision; torch has the dequantised weights rounded to it."""
    ours, torchs = (create(name, gpt2, GPU, "int8") for name in ("graph", "torch"))
    texts = [[(7 * i + j) % 50257 for j in range(20)] for i in range(count)]
    assert compare(ours, torchs, texts, 4) is None


def test_prompts_in_chunks(gpt2: Weights) -> None:
    prompts = [[(i * j) % 50257 for j in range(length)] for i, length in enumerate((700, 30, 411), 1)]
    llm = LLM.of(gpt2, GPU, "int8", executor="graph", max_batch=4)
    llm.executor.prompt_tokens = 128
    for prompt, completion in zip(prompts, llm.generate(prompts, replace(GREEDY, max_tokens=20)), strict=True):
        ids, new = (torch.tensor([row], device=GPU) for row in (prompt, completion.token_ids))
        assert Oracle(gpt2).judge(ids, new, "int8").right


def test_bits_of_a_sequence_in_any_company() -> None:
    llm = LLM("random:gpt2,n_layer=3", device="cuda", dtype="int8", executor="graph", deterministic="batch")
    texts = [[(11 * i + j) % 50257 for j in range(16)] for i in range(12)]
    assert first_dependence(llm.executor, texts, 3) is None


def test_codes_are_those_of_a_cpu() -> None:
    here, there = (load("random:gpt2,n_layer=1", dtype="int8", device=device) for device in ("cpu", "cuda"))
    assert here.tensors.keys() == there.tensors.keys()
    for name, value in there.tensors.items():
        assert value.is_cuda
        if value.dtype == torch.int8 or name.endswith(SCALE):
            assert torch.equal(value.cpu(), here.tensors[name]), name
        else:
            assert value.dtype == torch.float16
    assert there.activations == torch.float16


def test_a_stored_model(tmp_path: Path) -> None:
    model = "random:gpt2,n_layer=2"
    export(load(model, dtype="int8"), tmp_path / "small")
    llm = LLM(str(tmp_path / "small"), device="cuda")
    assert llm.dtype == "int8"
    params, prompt = replace(GREEDY, max_tokens=20), [5, 6, 7]
    expected = LLM(model, device="cuda", dtype="int8").generate(prompt, params)[0].token_ids
    assert llm.generate(prompt, params)[0].token_ids == expected


def test_auto_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = LLM("random:gpt2,n_layer=1", device="cuda", dtype="int8")
        llm.generate([1, 2], replace(GREEDY, max_tokens=3))
    assert "executor auto → persistent up to 8 sequences, graph beyond" in caplog.text
    assert llm.executor.described == "auto (persistent)"


def test_nothing_is_kept_twice(gpt2: Weights) -> None:
    """Besides codes and scales there is memory for one matrix, that of the LM head."""
    own = sum(value.nbytes for value in gpt2.tensors.values())
    plain = 2 * sum(value.numel() for name, value in gpt2.tensors.items() if not name.endswith(SCALE))
    assert own < 0.52 * plain
    fresh = replace(gpt2)
    before = torch.cuda.memory_allocated()
    padded_head(fresh)
    assert torch.cuda.memory_allocated() - before < 2 * 50304 * 768 + (1 << 20)
