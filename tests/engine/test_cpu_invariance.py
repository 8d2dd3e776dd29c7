"""On a CPU the bits of a row depend on its own tokens alone (`deterministic="batch"`), op by op and through `LLM`."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cfunc, types

from tests.engine.arrivals import random_params
from warpline import LLM, Completion, SamplingParams
from warpline.kernels.cpu import machine, products
from warpline.kernels.cpu.build import SEEN, optimised
from warpline.kernels.cpu.intrinsics import array, matrix

MODEL = "random:n_layer=3,n_head=4,n_embd=80,n_positions=160,vocab_size=601"
DTYPES = ("fp32", "fp16", "bf16", "int8")


def seen(completion: Completion) -> tuple[object, ...]:
    logprobs = [(t.token_id, t.logprob, t.top) for t in completion.logprobs or ()]
    return completion.token_ids, completion.text, completion.finish_reason, logprobs


@pytest.mark.parametrize("dtype", DTYPES)
def test_texts_are_the_same_in_any_company(dtype: str) -> None:
    """Alone, and in batches of any size that come and go, with prompts in chunks and prompts that begin alike, with any
    number of threads: tokens and log-probabilities to the bit."""
    rng = random.Random(5)
    llm = LLM(MODEL, device="cpu", dtype=dtype, deterministic="batch", max_batch=48)
    vocab, shared = llm.config.vocab_size, [rng.randrange(600) for _ in range(70)]
    prompts = [
        rng.choice([[], shared])[:] + [rng.randrange(vocab - 1) for _ in range(rng.randint(1, 60))] for _ in range(48)
    ]
    params = [replace(random_params(rng, longest=25), n=rng.choice([1, 1, 2])) for _ in prompts]
    expected = [list(map(seen, llm.generate(prompt, its))) for prompt, its in zip(prompts, params, strict=True)]
    teams = [llm, LLM(MODEL, device="cpu", dtype=dtype, deterministic="batch", max_batch=48, threads=3)]
    for size in (2, 3, 8, 9, 16, 48):
        for budget, asked in ((23, teams[0]), (2048, teams[1])):
            asked.engine.scheduler.prompt_tokens = budget
            order = rng.sample(range(len(prompts)), size)
            found = asked.generate([prompts[i] for i in order], [params[i] for i in order])
            assert list(map(seen, found)) == [one for i in order for one in expected[i]], (size, budget)
    single, handles = [i for i in range(48) if params[i].n == 1], []
    for i in rng.sample(single, len(single)):  # they join while others run
        handles.append((i, llm.submit(prompts[i], params[i])))
        if rng.random() < 0.3:
            handles[-1][1].result(timeout=60)
    assert all([seen(handle.result(timeout=60))] == expected[i] for i, handle in handles)
    for each in teams:
        each.close()


def multiplied(kind: str, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """All products of rows, by the function that decoding is made of."""
    outputs, inputs = weights.shape
    y = np.zeros((len(x), outputs), np.float32)
    room = np.zeros(products.ROOM * inputs + products.SUMS, np.float32)
    told = [weights.ctypes.data, x.ctypes.data, len(x), inputs, y.ctypes.data, outputs, room.ctypes.data]
    words = np.array(told, np.int64)
    _PRODUCTS[kind](words.ctypes.data, 0)
    return y


def _made(kind: str) -> object:
    multiply, whole, single = products.multiply_of(SEEN[kind]), np.int64, np.float32

    def entry(address: int, _: int) -> None:
        t = array(address, whole, 7)
        none = array(address, single, 0)
        multiply(t[0], none, none, t[1], t[2], t[3], matrix(t[4], single, t[2], t[5]), 0, t[5], False, t[6])

    made = cfunc(types.void(types.int64, types.int64), error_model="numpy", _nrt=False)(entry)
    return machine.loaded(optimised(str(made.inspect_llvm()).replace(made.native_name, machine.ENTRY)))


class _Products(dict):  # type: ignore[type-arg]
    def __missing__(self, kind: str) -> object:
        self[kind] = _made(kind)
        return self[kind]


_PRODUCTS = _Products()
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(DTYPES), st.integers(1, 200), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40),
    st.integers(0, 99),
)  # fmt: skip
def test_a_row_of_a_product_has_the_same_bits_beside_any_others(
    dtype: str, inputs: int, outputs: int, rows: int, others: int, seed: int
) -> None:
    """And is right, within the rounding of a sum of so many terms."""
    generator = torch.Generator().manual_seed(seed)
    weights = (20 * torch.randn(outputs, inputs, generator=generator)).to(TORCH[dtype])
    x = torch.randn(rows + others, inputs, generator=generator)
    held = weights.numpy() if dtype in ("fp32", "int8") else weights.view(torch.int16).numpy()
    found = multiplied(dtype, held, x.numpy())
    assert np.array_equal(multiplied(dtype, held, np.ascontiguousarray(x.numpy()[others:])), found[others:])
    exact, size = x.double() @ weights.double().T, x.double().abs() @ weights.double().abs().T
    assert bool(((torch.from_numpy(found) - exact).abs() <= (inputs + 1) * 2**-24 * size).all())


def test_log_probabilities_are_those_of_the_logits() -> None:
    """Against float64, and the likeliest in order."""
    llm = LLM(MODEL, device="cpu", dtype="fp32")
    completion = llm.generate([5, 9, 2], SamplingParams(max_tokens=6, temperature=0, logprobs=5, ignore_eos=True))[0]
    slots = llm.engine._allocated()
    (lane,) = slots.admit([llm._requests([[5, 9, 2]], [SamplingParams(max_tokens=6, temperature=0)])[0][1]])
    from tests.engine.running import spans

    llm.executor.prefill(slots, spans(slots, [lane]))
    logits = llm.executor.observe(slots, [lane])["logits"][0].double()
    assert completion.logprobs is not None
    its = completion.logprobs[1]
    exact = logits.log_softmax(0)
    assert its.logprob == pytest.approx(float(exact[its.token_id]), abs=1e-5)
    assert [token for token, _ in its.top] == exact.argsort(descending=True)[:5].tolist()
    assert [value for _, value in its.top] == pytest.approx(exact.sort(descending=True).values[:5].tolist(), abs=1e-5)
