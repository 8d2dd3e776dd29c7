"""On a CPU the bits of a row depend only on its own tokens (`deterministic="batch"`), op by op and through `LLM`."""

from __future__ import annotations

import platform
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cfunc, njit, types
from torch import Tensor

from tests.engine.arrivals import random_params
from warpline import LLM, Completion, SamplingParams
from warpline.engine.executors.cpu.forms import in_panels, padded
from warpline.kernels.cpu import machine, sizes
from warpline.kernels.cpu.build import SEEN
from warpline.kernels.cpu.intrinsics import INNER, array, matrix
from warpline.kernels.cpu.library import Build
from warpline.kernels.cpu.panels import RUN, multiply_panels_of
from warpline.kernels.cpu.products import multiply_of
from warpline.kernels.cpu.quanta import MOST, rounded

MODEL = "random:n_layer=3,n_head=4,n_embd=80,n_positions=160,vocab_size=601"
DTYPES = ("fp32", "fp16", "bf16", "int8")
#: A dtype of weights, and the matrix layout: rows, or panels for a CPU with wide or narrow vectors.
Kind = tuple[str, str]


def seen(completion: Completion) -> tuple[object, ...]:
    logprobs = [(t.token_id, t.logprob, t.top) for t in completion.logprobs or ()]
    return completion.token_ids, completion.text, completion.finish_reason, logprobs


@pytest.mark.parametrize("dtype", DTYPES)
def test_texts_are_the_same_in_any_company(dtype: str) -> None:
    """Alone, and in batches of any size with sequences that come and go, chunked prompts, shared beginnings and any
    number of threads: tokens and log-probabilities are equal to the bit."""
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


@settings(deadline=None, max_examples=8)
@given(
    heads=st.integers(1, 3), head_size=st.sampled_from([4, 12, 16, 20, 40, 64, 72]), layers=st.integers(1, 2),
    vocab=st.integers(33, 300), dtype=st.sampled_from(DTYPES), threads=st.integers(2, 5),
    window=st.sampled_from([None, 7]), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_models_of_any_shape_with_any_number_of_threads(
    heads: int, head_size: int, layers: int, vocab: int, dtype: str, threads: int, window: int | None,
    lengths: list[int], seed: int,
) -> None:  # fmt: skip
    """Tokens and log-probabilities are equal wherever prompts are split; in float32 they are the torch executor's."""
    shape = f"n_layer={layers},n_head={heads},n_embd={heads * head_size},n_positions=160,vocab_size={vocab}"
    model = f"random:{shape},seed={seed}"
    rng, params = random.Random(seed), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=2)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    one, many = (LLM(model, device="cpu", dtype=dtype, threads=count, window=window) for count in (1, threads))
    many.engine.scheduler.prompt_tokens = rng.randint(1, 200)
    expected = [seen(one.generate(prompt, params)[0]) for prompt in prompts]
    assert [seen(found) for found in many.generate(prompts, params)] == expected
    if dtype == "fp32":
        torchs = LLM(model, device="cpu", executor="torch", window=window).generate(prompts, params)
        for (_, _, _, ours), theirs in zip(expected, torchs, strict=True):
            assert theirs.logprobs is not None
            for (token, logprob, _), its in zip(ours, theirs.logprobs, strict=True):  # type: ignore[call-overload]
                assert logprob == pytest.approx(its.logprob, abs=1e-4)
                if token != its.token_id:
                    break  # a tie
    for llm in (one, many):
        llm.close()


def multiplied(kind: Kind, weights: Tensor, x: Tensor, **more: Any) -> Tensor:
    """Return the products of rows by the functions that decoding uses. `more`: bias, scales, earlier values of y."""
    dtype, form = kind
    (outputs, inputs), rows = weights.shape, len(x)
    held = weights if form == "rows" else in_panels(weights)
    scales, bias, y = (more.get(name) for name in ("scales", "bias", "y"))
    y = torch.zeros(rows, outputs) if y is None else y.clone()
    scales = padded(torch.ones(outputs) if scales is None else scales)
    bias = None if bias is None else bias if form == "rows" else padded(bias)
    room = torch.zeros(rows * sizes.row_bytes(inputs) + 4 * (sizes.ROOM * inputs + sizes.SUMS), dtype=torch.uint8)
    x = x.contiguous()
    places = (0 if each is None else each.data_ptr() for each in (held, x, y, scales, bias, room))
    words = np.array([*places, rows, inputs, outputs, "y" in more], np.int64)
    _PRODUCTS[dtype, form](words.ctypes.data, 0)
    return y


def _made(kind: Kind) -> Any:
    dtype, form = kind
    stored, whole, single = SEEN[dtype], np.int64, np.float32
    if form == "rows":
        multiply = multiply_of(stored)

        def entry(address: int, _: int) -> None:
            t = array(address, whole, 10)
            bias, y = array(t[4], single, t[8] if t[4] != 0 else 0), matrix(t[2], single, t[6], t[8])
            multiply(t[0], bias, t[1], t[6], t[7], y, 0, t[8], t[9] != 0, t[5])
    else:
        panels, is_code = multiply_panels_of(stored, form == "wide"), stored is np.int8
        row_bytes = njit(**INNER)(sizes.row_bytes)

        def entry(address: int, _: int) -> None:
            t = array(address, whole, 10)
            x, apart = t[1], 4 * t[7]
            if is_code:
                x, apart = t[5], row_bytes(t[7])
                for r in range(t[6]):
                    rounded(array(t[1] + 4 * r * t[7], single, t[7]), x + r * apart)
            count = (t[8] + sizes.PANEL - 1) // sizes.PANEL
            panels(t[0], t[3], t[4], x, apart, t[6], t[7], t[2], 4 * t[8], t[8], 0, count, t[9] != 0)

    made = cfunc(types.void(types.int64, types.int64), error_model="numpy", _nrt=False)(entry)
    return machine.loaded(machine.compiled(str(made.inspect_llvm()).replace(made.native_name, machine.ENTRY)))


class _Products(dict[Kind, Any]):
    def __missing__(self, kind: Kind) -> Any:
        self[kind] = _made(kind)
        return self[kind]


_PRODUCTS = _Products()
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = given(st.integers(1, 1100), st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))


@pytest.mark.parametrize("form", ["rows", "wide", "narrow"])
@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=15)
@SHAPES
def test_a_row_of_a_product_has_the_same_bits_beside_any_others(
    dtype: str, form: str, inputs: int, outputs: int, rows: int, others: int, seed: int
) -> None:
    """The product is right within the rounding of a sum of that many terms."""
    generator = torch.Generator().manual_seed(seed)
    weights = (20 * torch.randn(outputs, inputs, generator=generator)).to(FLOATS[dtype])
    x, bias = torch.randn(rows + others, inputs, generator=generator), torch.randn(outputs, generator=generator)
    before = 9 * torch.randn(rows + others, outputs, generator=generator)
    found = multiplied((dtype, form), weights, x, bias=bias, y=before)
    assert found[others:].equal(multiplied((dtype, form), weights, x[others:], bias=bias, y=before[others:]))
    if form == "narrow":  # the same order on all CPUs
        assert found.equal(multiplied((dtype, "wide"), weights, x, bias=bias, y=before))
    exact = x.double() @ weights.double().T + bias + before
    size = x.double().abs() @ weights.double().abs().T + bias.abs() + before.abs()
    assert bool(((found - exact).abs() <= (inputs + 3) * 2**-24 * size).all())


@settings(deadline=None, max_examples=15)
@SHAPES
def test_codes_have_the_same_bits_beside_any_others_on_any_cpu(
    inputs: int, outputs: int, rows: int, others: int, seed: int
) -> None:
    """Every code is right within half a quantum of x."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.5, 2, outputs).astype(np.float32)
    x = (rng.standard_normal((rows + others, inputs)) * rng.choice([1, 30, 1e-3], inputs)).astype(np.float32)
    x[rng.integers(len(x))] *= rng.choice([0, 1e-25, 1e25])
    given, more = (torch.from_numpy(codes), torch.from_numpy(x)), {"scales": torch.from_numpy(scales)}
    found = multiplied(("int8", "wide"), *given, **more)
    assert found.equal(multiplied(("int8", "narrow"), *given, **more))
    assert found[others:].equal(multiplied(("int8", "wide"), given[0], given[1][others:], **more))
    matrix, plain = codes.T.astype(np.float64) * scales, x.astype(np.float64)
    quantum = np.abs(plain).max(axis=1, keepdims=True) / MOST
    off = 0.5001 * quantum * np.abs(matrix).sum(axis=0) + (inputs + 3) * 2**-23 * (np.abs(plain) @ np.abs(matrix))
    assert (np.abs(found.numpy() - plain @ matrix) <= off).all()


def test_the_largest_sums_of_codes_do_not_overflow() -> None:
    """All codes are -128 and all of x at its largest quantum, in full runs."""
    codes, x = torch.full((33, 4 * RUN + 3), -128, dtype=torch.int8), torch.full((7, 4 * RUN + 3), -3.0)
    for form in ("wide", "narrow"):
        found = multiplied(("int8", form), codes, x)
        assert found.numpy() == pytest.approx(np.full((7, 33), 3.0 * 128 * (4 * RUN + 3)), rel=1e-5)


@pytest.mark.parametrize("form", ["wide", "narrow"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(form: str, value: float) -> None:
    x, codes = torch.ones(3, 70), torch.ones(5, 70, dtype=torch.int8)
    x[1, 69] = value
    found = multiplied(("int8", form), codes, x)
    assert found[1].isnan().all()
    assert found[::2].numpy() == pytest.approx(70, rel=1e-5)


#: Compiles a program as for a CPU with vectors of 32 bytes, and prints its machine code.
_NARROW = """
import sys
from pathlib import Path
from warpline.kernels.cpu import machine

triple, _, features = machine._host()
fewer = ",".join("-" + each[1:] if "avx512" in each or "avx10" in each else each for each in features.split(","))
machine._host = lambda: (triple, "x86-64-v3", fewer)

from warpline.kernels.cpu import build

target, texts = machine.target(), []


class Target:
    def __getattr__(self, name):
        return getattr(target, name)

    def emit_object(self, module):
        texts.append(target.emit_assembly(module))
        return target.emit_object(module)


machine.llvm.create_pass_builder = lambda cpu, options, made=machine.llvm.create_pass_builder: made(target, options)
machine.target = Target
Path(sys.argv[1]).write_bytes(machine.compiled(build.lowered(*sys.argv[2:]), apart=build.ONE_COPY))
print("zmm" in texts[0], "ymm" in texts[0])
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="vectors of 32 and 64 bytes are x86's")
@pytest.mark.parametrize(("dtype", "cached"), [("fp32", "fp32"), ("int8", "fp16")])
def test_a_cpu_without_avx_512(dtype: str, cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for such a CPU writes the same tokens."""
    if "+avx2" not in machine.features():
        pytest.skip("this CPU has no vectors of 32 bytes")
    file = tmp_path / "x.o"
    done = subprocess.run(
        [sys.executable, "-c", _NARROW, str(file), dtype, cached, "gelu_tanh"],
        capture_output=True, text=True, check=True, timeout=250,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True"]
    function = machine.loaded(file.read_bytes())
    rng, params = random.Random(8), SamplingParams(max_tokens=30, temperature=0.7, top_k=9, seed=4)
    prompts = [[rng.randrange(600) for _ in range(length)] for length in (1, 7, 90)]
    expected = LLM(MODEL, device="cpu", dtype=dtype).generate(prompts, params)
    monkeypatch.setattr(Build, "function", lambda _: function)
    found = LLM(MODEL, device="cpu", dtype=dtype).generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_log_probabilities_are_those_of_the_logits() -> None:
    """They equal those of float64, with the likeliest in order."""
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
