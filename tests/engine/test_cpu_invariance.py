"""On a CPU the bits of a row depend on its own tokens alone (`deterministic="batch"`), op by op and through `LLM`."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cfunc, njit, types

from tests.engine.arrivals import random_params
from warpline import LLM, Completion, SamplingParams
from warpline.kernels.cpu import integers, machine, products, sizes
from warpline.kernels.cpu.build import SEEN, optimised
from warpline.kernels.cpu.intrinsics import INNER, array, matrix

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
    """All products of rows, by the function that decoding is made of; of codes by a unit's name."""
    outputs, inputs = weights.shape
    y, scales = np.zeros((len(x), outputs), np.float32), np.ones(outputs, np.float32)
    room = torch.zeros(4 * (sizes.ROOM * inputs + sizes.SUMS) + len(x) * sizes.row_bytes(inputs), dtype=torch.uint8)
    at = (each.ctypes.data for each in (weights, x, y, scales))
    words = np.array([*at, room.data_ptr(), len(x), inputs, outputs], np.int64)
    _PRODUCTS[kind](words.ctypes.data, 0)
    return y


def _made(kind: str) -> object:
    whole, single = np.int64, np.float32
    if kind in UNITS:
        multiply_codes = products.multiply_codes_of(UNITS[kind])
        rounded, row_bytes = integers.rounded_of(UNITS[kind]), njit(**INNER)(sizes.row_bytes)

        def entry(address: int, _: int) -> None:
            t = array(address, whole, 8)
            x = matrix(t[1], single, t[5], t[6])
            for r in range(t[5]):
                rounded(x[r], t[4] + r * row_bytes(t[6]))
            multiply_codes(t[0], t[3], 0, t[4], t[5], t[6], t[2], t[7], 0, t[7], False)
    else:
        multiply = products.multiply_of(SEEN[kind])

        def entry(address: int, _: int) -> None:
            t = array(address, whole, 8)
            none, y = array(address, single, 0), matrix(t[2], single, t[5], t[7])
            multiply(t[0], none, t[1], t[5], t[6], y, 0, t[7], False, t[4])

    made = cfunc(types.void(types.int64, types.int64), error_model="numpy", _nrt=False)(entry)
    return machine.loaded(optimised(str(made.inspect_llvm()).replace(made.native_name, machine.ENTRY)))


class _Products(dict):  # type: ignore[type-arg]
    def __missing__(self, kind: str) -> object:
        self[kind] = _made(kind)
        return self[kind]


_PRODUCTS = _Products()
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: What this CPU has of the ways to multiply codes. 16-bit numbers are what a CPU without VNNI has.
UNITS = {
    unit.name: unit
    for unit, feature in ((integers.WORDS, "+"), (integers.NARROW, "+avxvnni"), (integers.WIDE, "+avx512vnni"))
    if feature in machine.features()
}
SHAPES = given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))


@pytest.mark.parametrize("dtype", TORCH)
@settings(deadline=None, max_examples=15)
@SHAPES
def test_a_row_of_a_product_has_the_same_bits_beside_any_others(
    dtype: str, inputs: int, outputs: int, rows: int, others: int, seed: int
) -> None:
    """And is right, within the rounding of a sum of so many terms."""
    generator = torch.Generator().manual_seed(seed)
    weights = (20 * torch.randn(outputs, inputs, generator=generator)).to(TORCH[dtype])
    x = torch.randn(rows + others, inputs, generator=generator)
    held = weights.numpy() if dtype == "fp32" else weights.view(torch.int16).numpy()
    found = multiplied(dtype, held, x.numpy())
    assert np.array_equal(multiplied(dtype, held, np.ascontiguousarray(x.numpy()[others:])), found[others:])
    exact, size = x.double() @ weights.double().T, x.double().abs() @ weights.double().abs().T
    assert bool(((torch.from_numpy(found) - exact).abs() <= (inputs + 1) * 2**-24 * size).all())


@pytest.mark.parametrize("unit", UNITS)
@settings(deadline=None, max_examples=15)
@SHAPES
def test_codes_have_the_same_bits_beside_any_others_on_any_unit(
    unit: str, inputs: int, outputs: int, rows: int, others: int, seed: int
) -> None:
    """And is right, within half a quantum of x for every code."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    x = (rng.standard_normal((rows + others, inputs)) * rng.choice([1, 30, 1e-3], inputs)).astype(np.float32)
    x[rng.integers(len(x))] *= rng.choice([0, 1e-25, 1e25])
    found = multiplied(unit, codes, x)
    assert np.array_equal(multiplied(unit, codes, np.ascontiguousarray(x[others:])), found[others:])
    wide, plain = codes.T.astype(np.float64), x.astype(np.float64)
    quantum = np.abs(plain).max(axis=1, keepdims=True) / (127 * 256 + 127)
    off = 0.5001 * quantum * np.abs(wide).sum(axis=0) + (inputs + 1) * 2**-23 * (np.abs(plain) @ np.abs(wide))
    assert (np.abs(found - plain @ wide) <= off).all()


def test_a_cpu_has_the_widest_unit_it_knows() -> None:
    known = {"+avx512vnni,+avx512bw,+avxvnni": "wide", "+avx512vnni,+avxvnni": "narrow", "+avx2,-avx512vnni": "words"}
    assert {features: integers.unit_of(features).name for features in known} == known


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(unit: str, value: float) -> None:
    x, codes = np.ones((3, 70), np.float32), np.ones((5, 70), np.int8)
    x[1, 69] = value
    found = multiplied(unit, codes, x)
    assert np.isnan(found[1]).all()
    assert found[::2] == pytest.approx(70, rel=1e-5)


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
