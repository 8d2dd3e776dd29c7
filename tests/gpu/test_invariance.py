"""`deterministic="batch"`: the bits of a row depend only on its own tokens, op by op and through the engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.arrivals import random_params
from warpline import LLM, Completion, SamplingParams
from warpline.config import EngineConfig
from warpline.engine.executors import Executor
from warpline.engine.executors.persistent.executor import PersistentExecutor
from warpline.engine.request import Request, Span
from warpline.kernels import launch
from warpline.kernels.catalog import find
from warpline.kernels.catalog.group import in_tiles
from warpline.kernels.catalog.prompts import prompt_tiles
from warpline.model.weights import load

GPU = torch.device("cuda:0")
ROWS = (1, 2, 3, 8, 9, 16, 63, 65, 128, 129, 300, 1100)
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
ANY = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def check_rows(run: Callable[[Tensor], list[Tensor]], x: Tensor) -> None:
    """Rows in any number and order give the same as among all."""
    expected = run(x)
    for rows in ROWS:
        chosen = torch.randperm(len(x), device=x.device)[:rows]
        for all_rows, found in zip(expected, run(x[chosen].contiguous()), strict=True):
            assert torch.equal(all_rows[chosen], found), rows


def launched(op: str, *inputs: Tensor) -> list[Tensor]:
    return launch.run(find(op), inputs, invariant=True)


@ANY
@pytest.mark.parametrize(("outputs", "inputs"), [(2304, 768), (768, 3072), (50304, 768), (200, 72)])
def test_products(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        torch.randn(shape, device=GPU, dtype=dtype) for shape in ((1100, inputs), (outputs, inputs), (outputs,))
    )
    check_rows(lambda rows: launched("matmul_bias", rows, weight, bias), x)


@HALF
@pytest.mark.parametrize("op", ["standard_matmul_bias", "standard_matmul_bias_gelu"])
@pytest.mark.parametrize(("outputs", "inputs"), [(2304, 768), (3072, 768), (1008, 192)])
def test_products_of_rows_that_are_standardised(op: str, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape, device=GPU, dtype=dtype) for shape in ((1100, inputs), (outputs, inputs)))
    tiles, sums, bias = in_tiles(weight), weight.float().sum(1), torch.randn(outputs, device=GPU)

    def run(rows: Tensor) -> list[Tensor]:
        (statistics,) = launched("row_statistics", rows)
        return launched(op, rows, statistics, tiles, sums, bias)

    check_rows(run, x)


@HALF
@pytest.mark.parametrize(("outputs", "inputs"), [(768, 768), (768, 3072), (1600, 6400), (64, 4096)])
def test_products_with_a_residual(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """The residual is part of the row, so that one order applies to both; statistics are stored side by side."""
    rows = torch.randn(1100, inputs + outputs, device=GPU, dtype=dtype)
    tiles, bias = (
        in_tiles(torch.randn(outputs, inputs, device=GPU, dtype=dtype)),
        torch.randn(outputs, device=GPU, dtype=dtype),
    )

    def run(rows: Tensor) -> list[Tensor]:
        x, residual = (part.contiguous() for part in rows.split([inputs, outputs], dim=1))
        y, statistics = launched("group_matmul_bias_residual", x, tiles, bias, residual)
        return [y, statistics.transpose(0, 1)]

    check_rows(run, rows)


@ANY
@pytest.mark.parametrize("columns", [768, 1600])
def test_layernorm(columns: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape, device=GPU, dtype=dtype) for shape in ((1100, columns), columns, columns))
    check_rows(lambda rows: launched("layernorm", rows, weight, bias), x)
    check_rows(lambda rows: launched("residual_layernorm", rows, rows.flip(1).contiguous(), weight, bias), x)


@ANY
@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_a_new_token(window: int, dtype: torch.dtype) -> None:
    """With other sequences, perhaps longer, and in a step bound for longer contexts."""
    slots, heads, positions, depth = 70, 3, 1000, 64
    k, v = (torch.randn(slots, heads, positions, depth, device=GPU, dtype=dtype) for _ in range(2))
    new = torch.randn(3, slots, heads, 1, depth, device=GPU, dtype=dtype)
    length = torch.randint(1, positions, (slots,), device=GPU)

    def run(lanes: Tensor, bound: int) -> Tensor:
        inputs = [
            *(part[lanes].contiguous() for part in new),
            k[:, :, :bound].clone(),
            v[:, :, :bound].clone(),
            length,
            lanes,
        ]
        return launch.run(find("append_attention"), inputs, invariant=True, numbers={"window": window})[0]

    every = torch.arange(slots, device=GPU)
    expected = run(every, positions)
    for count in (1, 2, 9, 33):
        lanes = torch.randperm(slots, device=GPU)[:count]
        assert torch.equal(run(lanes, positions), expected[lanes])
        bound = int(length[lanes].max())
        assert torch.equal(run(lanes, -(-bound // 128) * 128), expected[lanes])


@ANY
@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_prompts_in_parts(window: int, dtype: torch.dtype) -> None:
    """Split anywhere, and beside other prompts or alone."""
    heads, count, depth, spec = 3, 500, 64, find("prompt_attention")
    q, k, v = torch.randn(3, 1, heads, count, depth, device=GPU, dtype=dtype).unbind()
    name = launch.DTYPES[dtype]

    def run(cuts: list[int], beside: int) -> tuple[Tensor, ...]:
        caches = [torch.zeros(2, heads, 600, depth, device=GPU, dtype=dtype) for _ in range(2)]
        found = []
        for first, last in itertools.pairwise([0, *cuts, count]):
            part = [x[:, :, first:last] for x in (q, k, v)]
            packed = [torch.cat([torch.randn_like(x[:, :, :1]).expand(-1, -1, beside, -1), x], 2) for x in part]
            dims = {"rows": packed[0].shape[2], "heads": heads, "depth": depth, "slots": 2, "positions": 600}
            tile = launch.tunables_of(spec, name, dims, 0, invariant=True)["tile_queries"]
            spans = [(1, 0, 0, beside), (0, first, beside, last - first)][beside == 0 :]
            slot, start, row, rows = np.array(spans).T
            table = prompt_tiles(slot, start, row, rows, tile)
            inputs = [*(x.contiguous() for x in packed), torch.from_numpy(table).to(GPU), *caches]
            found.append(launch.run(spec, inputs, invariant=True, numbers={"window": window})[0][:, beside:])
        return torch.cat(found, 1), *(cache[0, :, :count] for cache in caches)

    expected = run([], 0)
    for cuts, beside in (([64], 0), ([1, 65, 200], 0), ([90], 0), ([], 70), ([133, 134, 300], 9)):
        assert all(map(torch.equal, expected, run(cuts, beside))), (cuts, beside)


def kept(executor: Executor, asked: list[Request]) -> list[tuple[list[int], Tensor]]:
    """Return the tokens of each sequence, and the bits of its keys and values."""
    slots = executor.allocate(len(asked), max(request.limit for request in asked))
    lanes = slots.admit(asked)
    for slot, request in zip(lanes, asked, strict=True):  # one by one: prompts are tested elsewhere
        executor.prefill(slots, [Span(slot, 0, len(request.prompt), (slot,))])
    for _ in range(0, max(request.limit - len(request.prompt) for request in asked), 7):
        executor.decode(slots, lanes, 7)
    news = slots.report(lanes, slots.capacity).wait()
    caches = torch.stack([slots.cache.k, slots.cache.v])
    return [
        ([*map(int, row[:count])], caches[:, :, slot, :, : request.limit - 1].contiguous())
        for slot, row, count, request in zip(lanes, news.tokens, news.counts, asked, strict=True)
    ]


@pytest.mark.parametrize(
    ("model", "dtype", "arch", "window", "lengths"),
    [
        ("random:gpt2", "fp16", None, None, [16, 3, 180, 97, 95, 700, 1, 400]),
        ("random:gpt2", "fp32", None, None, [16, 300, 90, 97]),
        ("random:gpt2", "fp16", "compute_75", None, [90, 300]),
        ("random:gpt2-medium,n_layer=3", "fp16", None, None, [16, 3, 180, 97, 95, 700, 1, 400]),
        ("random:gpt2,n_layer=3", "fp16", None, 130, [16, 3, 180, 120, 95, 700, 1, 400]),
        ("stories", "bf16", None, None, [16, 3, 180, 97, 95, 12, 1, 9]),
    ],
)
def test_the_persistent_kernel_computes_rows_apart(
    model: str, dtype: str, arch: str | None, window: int | None, lengths: list[int]
) -> None:
    """Keys, values and tokens are equal to the bit: greedy and sampled, with contexts of one part or several, beside
    shorter and longer ones, and beside ended rows."""
    weights = load(model, dtype=dtype, device="cuda")
    weights = replace(weights, config=replace(weights.config, window=window))
    executor = PersistentExecutor(weights, GPU, dtype, arch=arch)
    executor.set_up(EngineConfig(deterministic="batch"), model)
    rng, settings = (
        random.Random(4),
        [
            SamplingParams(temperature=0, max_tokens=999, ignore_eos=True),
            SamplingParams(temperature=0.9, max_tokens=999, ignore_eos=True),
            SamplingParams(temperature=0.8, top_p=0.95, max_tokens=999, ignore_eos=True, logit_bias={7: 1.5}),
            SamplingParams(
                temperature=1.0, top_k=40, min_p=0.01, repetition_penalty=1.2, max_tokens=999, ignore_eos=True
            ),
        ],
    )
    asked = [
        Request(
            [rng.randrange(weights.config.vocab_size) for _ in range(length)],
            settings[i % 4],
            i,
            0,
            length + 12 + 6 * i,
        )
        for i, length in enumerate(lengths)
    ]
    alone = [kept(executor, [request])[0] for request in asked]
    for size in (2, 3, 4, 5, 8):
        if size > (executor.most_lanes or 0):
            break
        for _ in range(2):
            chosen = rng.sample(range(len(asked)), size)
            for i, (tokens, caches) in zip(chosen, kept(executor, [asked[i] for i in chosen]), strict=True):
                assert tokens == alone[i][0], (size, i)
                assert torch.equal(caches, alone[i][1]), (size, i)


MODELS = pytest.mark.parametrize(
    ("model", "dtype"), [("stories", "fp16"), ("stories", "bf16"), ("stories", "fp32"), ("random:gpt2", "fp16")]
)


def seen(completion: Completion) -> tuple[object, ...]:
    logprobs = [(t.token_id, t.logprob, t.top) for t in completion.logprobs or ()]
    return completion.token_ids, completion.text, completion.finish_reason, logprobs


@MODELS
@pytest.mark.parametrize("most", [8, 64])
def test_texts_are_the_same_in_any_company(model: str, dtype: str, most: int) -> None:
    """Alone, and in batches of any size with sequences that come and go, chunked prompts and shared beginnings: tokens
    and log-probabilities are equal to the bit. With at most eight at once the persistent kernel decodes."""
    rng = random.Random(5)
    llm = LLM(model, device="cuda", dtype=dtype, deterministic="batch", max_batch=most)
    vocab, shared = llm.config.vocab_size, [rng.randrange(5000) for _ in range(90)]
    prompts = [
        rng.choice([[], shared])[:] + [rng.randrange(vocab - 1) for _ in range(rng.randint(1, 60))] for _ in range(48)
    ]
    params = [random_params(rng, longest=60) for _ in prompts]
    expected = [seen(llm.generate(prompt, its)[0]) for prompt, its in zip(prompts, params, strict=True)]
    for size in (2, 3, 8, 9, 16, 48):
        for budget in (64, 16384):
            llm.engine.scheduler.prompt_tokens = budget
            order = rng.sample(range(len(prompts)), size)
            found = llm.generate([prompts[i] for i in order], [params[i] for i in order])
            assert [seen(completion) for completion in found] == [expected[i] for i in order], (size, budget)
    handles = []
    for i in rng.sample(range(len(prompts)), len(prompts)):  # they join while others run
        handles.append((i, llm.submit(prompts[i], params[i])))
        if rng.random() < 0.3:
            handles[-1][1].result(timeout=60)
    assert all(seen(handle.result(timeout=60)) == expected[i] for i, handle in handles)
    assert llm.executor.described == ("auto (persistent)" if most == 8 else "auto (graph)")


def test_long_texts_are_the_same_in_any_company() -> None:
    """Contexts with several parts of attention."""
    rng = random.Random(6)
    llm = LLM("random:gpt2", device="cuda", dtype="fp16", deterministic="batch", max_batch=24)
    prompts = [[rng.randrange(50000) for _ in range(rng.choice([5, 250, 500, 800]))] for _ in range(20)]
    params = SamplingParams(max_tokens=120, temperature=1.0, top_p=0.95, seed=3, logprobs=1, ignore_eos=True)
    expected = [seen(llm.generate(prompt, params)[0]) for prompt in prompts]
    llm.engine.scheduler.prompt_tokens = 384
    assert [seen(completion) for completion in llm.generate(prompts, params)] == expected
