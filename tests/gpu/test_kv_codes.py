"""An int8 KV cache on a GPU: codes equal to the bit, executors compared with torch's with the same rounding, and texts
that depend neither on the batch nor on how prompts are split."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.conftest import SMALL
from tests.engine.arrivals import random_params
from tests.gpu.test_invariance import seen
from tests.gpu.test_persistent import GPU, requests, run
from warpline import LLM, SamplingParams
from warpline.codes import decode, encode
from warpline.config import ROUNDING, EngineConfig
from warpline.engine.check.diff import compare
from warpline.engine.crossing import NOT_FINITE
from warpline.engine.executors import create
from warpline.engine.request import Request, Span
from warpline.kernels import launch
from warpline.kernels.catalog import find
from warpline.model.weights import load

INT8 = EngineConfig(kv_dtype="int8")
NAMES = pytest.mark.parametrize("name", ["kernels", "graph", "auto"])
ANY = pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
GREEDY = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def hard_rows(count: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Return rows of any size: zeros, tiny ones, the largest possible, and some with NaN or infinity."""
    rows = torch.randn(count, depth, device=GPU) * 2.0 ** torch.randint(-9, 9, (count, 1), device=GPU)
    rows[0], rows[1] = 0, torch.randn(depth, device=GPU) * 1e-37
    rows[2] = torch.finfo(dtype).max * torch.randn(depth, device=GPU).sign()
    rows[3, depth // 2], rows[4, 0], rows[5, -1] = torch.nan, torch.inf, -torch.inf
    return rows.to(dtype)


@ANY
@pytest.mark.parametrize("depth", [1, 3, 16, 24, 63, 64, 80, 128])
def test_codes_and_scales_are_torchs_to_the_bit(depth: int, dtype: str) -> None:
    """For the rows of a prompt and of a new token, which two kernels encode."""
    kind, rows = launch.TORCH_TYPES[dtype], 37
    k, v = (hard_rows(rows, depth, kind) for _ in range(2))
    expected = [encode(t) for t in (k, v)]
    caches = [torch.zeros(rows, 1, 2, depth, dtype=torch.int8, device=GPU) for _ in range(4)]
    scales = [torch.zeros(rows, 1, 2, 2, device=GPU) for _ in range(2)]
    lanes, ones = torch.arange(rows, device=GPU), torch.ones(rows, dtype=torch.int64, device=GPU)
    given = [t.clone().view(1, 1, rows, depth) for t in (k, v)]
    launch.run(find("quantise_kv"), [*given, lanes, ones, *caches[:2], scales[0]])
    new = [t.view(rows, 1, 1, depth) for t in (k, v)]
    launch.run(find("append_attention_int8"), [torch.zeros_like(new[0]), *new, *caches[2:], scales[1], 2 * ones, lanes])
    for i, (codes, scale) in enumerate(expected):
        for found, found_scales in ((caches[i], scales[0]), (caches[2 + i], scales[1])):
            assert torch.equal(found[:, 0, 1], codes)
            assert torch.equal(found_scales[:, 0, 1, i].nan_to_num(7), scale[:, 0].nan_to_num(7))
            assert not found[:, 0, 0].any()
        assert torch.equal(given[i][0, 0].nan_to_num(7), decode(codes, scale).to(kind).nan_to_num(7))


@NAMES
@ANY
@pytest.mark.parametrize(
    ("model", "lengths"),
    [(SMALL, [1]), (SMALL, [9, 40, 17]), (SMALL, [30] * 12), ("random:gpt2", [300]), ("random:gpt2", [70, 130] * 5)],
)
def test_executors_compute_what_torch_does(model: str, lengths: list[int], dtype: str, name: str) -> None:
    """Step by step on the same text, prompts included, as near as rounding allows."""
    weights, rng = load(model, dtype=dtype, device="cuda"), random.Random(1)
    texts = [[rng.randrange(weights.config.vocab_size) for _ in range(length + 6)] for length in lengths]
    ours, theirs = (create(kind, weights, GPU, dtype, INT8) for kind in (name, "torch"))
    assert compare(ours, theirs, texts, 6) is None


@NAMES
@ANY
def test_a_prompt_in_parts_is_the_whole_prompt(name: str, dtype: str) -> None:
    """Later parts read from the cache what earlier ones wrote."""
    weights = load("random:gpt2,n_layer=3", dtype=dtype, device="cuda")
    executor = create(name, weights, GPU, dtype, INT8)
    (request,), logits = requests(weights, [300], 9), []
    for cuts in ([300], [64, 300], [1, 65, 200, 201, 300], [90, 300]):
        slots = executor.allocate(3, request.limit)
        (slot,) = slots.admit([request])
        for start, end in zip([0, *cuts], cuts, strict=False):
            executor.prefill(slots, [Span(slot, start, end, (slot,) if end == 300 else ())])
        slots.tokens[slot, 300] = 17  # the same whatever was chosen
        logits.append(executor.observe(slots, [slot])["logits"].float())
    for others in logits[1:]:  # products with other numbers of rows round in another order, in every layer
        allowed = 6 * max(ROUNDING[dtype], 2**-10) * (8 * 4) ** 0.5
        assert (others - logits[0]).abs().max() <= allowed * logits[0].abs().max()


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_texts_are_the_same_in_any_company(dtype: str) -> None:
    """With deterministic="batch", token ids and log-probabilities are equal to the bit, prompts split anywhere."""
    rng = random.Random(5)
    llm = LLM("stories", device="cuda", dtype=dtype, kv_dtype="int8", deterministic="batch", max_batch=24)
    vocab, shared = llm.config.vocab_size, [rng.randrange(5000) for _ in range(90)]
    prompts = [
        rng.choice([[], shared])[:] + [rng.randrange(vocab - 1) for _ in range(rng.randint(1, 60))] for _ in range(24)
    ]
    params = [random_params(rng, longest=60) for _ in prompts]
    expected = [seen(llm.generate(prompt, its)[0]) for prompt, its in zip(prompts, params, strict=True)]
    for budget in (64, 16384):
        llm.engine.scheduler.prompt_tokens = budget
        assert [seen(completion) for completion in llm.generate(prompts, params)] == expected
    assert llm.executor.described == "auto (graph)"


def test_repeated_runs_have_the_same_bits() -> None:
    weights = load("random:gpt2", dtype="fp16", device="cuda")
    executor = create("graph", weights, GPU, "fp16", INT8)
    asked = requests(weights, [30, 500, 7] * 30, 40)
    assert run(executor, asked) == run(executor, asked)


def test_perplexity_stays() -> None:
    """On the model's own texts, within half a percent of fp16's."""
    plain = LLM("stories", device="cuda", dtype="fp16", executor="graph")
    params = SamplingParams(max_tokens=180, seed=3, n=24)
    texts = [completion.text for completion in plain.generate("Once upon a time", params)]
    coded = LLM("stories", device="cuda", dtype="fp16", kv_dtype="int8")
    assert coded.score(texts).perplexity <= 1.005 * plain.score(texts).perplexity


def test_half_as_much_memory() -> None:
    weights = load("random:gpt2", dtype="fp16", device="cuda")
    sizes = []
    for asked in (EngineConfig(), INT8):
        executor = create("graph", weights, GPU, "fp16", asked)
        slots = executor.allocate(64, 1024)
        sizes.append(sum(tensor.nbytes for tensor in slots.cache.tensors))
        del slots
    assert sizes[1] == sizes[0] * (64 + 4) / 128


def test_what_is_no_number_ends_its_sequence_alone() -> None:
    weights = load(SMALL, dtype="fp16", device="cuda")
    executor = create("graph", weights, GPU, "fp16", INT8)
    slots = executor.allocate(3, 60)
    asked = [Request([1, 2, 3, 4], GREEDY, 0, i, 30) for i in range(3)]
    lanes = slots.admit(asked)
    executor.prefill(slots, [Span(slot, 0, 4, (slot,)) for slot in lanes])
    assert slots.cache.scales is not None
    slots.cache.scales[1, lanes[1], 2, 0, 1] = torch.nan
    executor.decode(slots, lanes, 5)
    flags = slots.report(lanes, 60).wait().flags & NOT_FINITE
    assert flags.astype(bool).tolist() == [False, True, False]
