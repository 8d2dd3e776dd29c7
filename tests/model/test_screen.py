"""Bounds of logits from codes hold, whatever the weights and the hidden state, and are tight enough to be of use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from tests.conftest import SMALL
from tests.engine.running import run, spans
from warpline.config import SamplingParams as Params
from warpline.engine.executors.cpu.executor import CpuExecutor
from warpline.engine.request import Request
from warpline.kernels.cpu.screen import is_beyond, is_within, mark_above, mark_drawn
from warpline.kernels.noise import gumbel
from warpline.model.screen import Screen, upper_half
from warpline.model.weights import load

F = np.float32
CPU = torch.device("cpu")
INFINITE = F(np.inf)


def device_bounds(screen: Screen, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What cuda/screen.cuh makes of a row, step by step, in its arithmetic."""
    width = len(h)
    with np.errstate(all="ignore"):
        square = F((h.astype(F) ** 2).sum(dtype=F))
        length = F(F(square * F(1 / np.sqrt(square))) * F(1 + 2**-10))
        root = F(np.ceil(np.sqrt(width)))
        quantum = F(length * F(1 / 32600))
        rest = F(F(0.51) * root * quantum + F(width * 2**-21) * length)
        if not 1e-15 < length < 1e18:
            quantum, length, rest = F(0), INFINITE, INFINITE
        quanta = np.rint(h.astype(F) * F(F(1) / quantum)).astype(np.int64) if quantum > 0 else np.zeros(width, np.int64)
        upper = (quanta + 128) >> 8
        lower = quanta - 256 * upper
        assert np.abs(upper).max() <= 127
        assert lower.min() >= -128
        assert lower.max() <= 127
        codes = screen.codes.numpy().astype(np.int64)
        sums = F(256) * (codes @ upper).astype(F) + (codes @ lower).astype(F)
        about = sums * quantum * screen.scale.numpy()
        half = [(upper_half(x) << 16).view(torch.float32).numpy() for x in (screen.error, screen.norm)]
        off = (length * half[0] + rest * half[1]) * F(1.001) + np.abs(about) * F(2**-20) + F(1e-30)
        low, high = about - off, about + off
    return np.where(np.isnan(low), -INFINITE, low), np.where(np.isnan(high), INFINITE, high)


def products(matrix: np.ndarray, h: np.ndarray) -> list[np.ndarray]:
    """Logits, to many digits and as float32 sums in several orders."""
    with np.errstate(all="ignore"):
        terms = matrix.astype(F) * h.astype(F)
        return [
            (matrix.astype(np.float64) * h.astype(np.float64)).sum(1),
            np.cumsum(terms, axis=1, dtype=F)[:, -1],
            np.cumsum(terms[:, ::-1], axis=1, dtype=F)[:, -1],
            terms.sum(1, dtype=F),
        ]


def adversarial(rng: np.random.Generator, dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """Rows of all kinds: far apart in size, alike, alone, at the ends of what the type can say."""
    matrix = rng.standard_normal((rows, width))
    small, large = (1e-4, 30.0) if dtype == torch.float16 else (1e-12, 1e12)
    matrix *= rng.choice([1.0, 1.0, 1.0, small, large, 0.0], (rows, 1))
    matrix[rng.integers(rows)] = matrix[rng.integers(rows)]  # a tie
    matrix[rng.integers(rows)] = np.eye(width)[rng.integers(width)] * 100  # a single weight
    result = torch.tensor(matrix).to(dtype)
    info = torch.finfo(dtype)
    result[rng.integers(rows)] = info.smallest_normal / 8
    result[rng.integers(rows), rng.integers(width)] = info.max
    result[rng.integers(rows), 0] = float(rng.choice([1.0, np.inf, -np.inf, np.nan]))
    return result


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from([16, 48, 768, 1600]),
    size=st.sampled_from([1e-14, 1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    kind=st.sampled_from(["noise", "worst", "peak", "zero"]),
)
@settings(max_examples=60)
def test_no_logit_is_outside_its_bounds(seed: int, width: int, size: float, dtype: torch.dtype, kind: str) -> None:
    rng = np.random.default_rng(seed)
    matrix = adversarial(rng, dtype, 40, width)
    screen = Screen.of(matrix)
    exact = matrix.double().numpy()
    if kind == "worst":  # along the error of a row, where Cauchy-Schwarz is an equality
        row = rng.integers(40)
        h = exact[row] - screen.codes[row].double().numpy() * float(screen.scale[row])
        h = np.nan_to_num(h / max(np.abs(np.nan_to_num(h)).max(), 1e-300), posinf=1, neginf=-1)
    else:
        h = rng.standard_normal(width) * (kind != "zero")
        h[rng.integers(width)] *= 1000 if kind == "peak" else 1
    hidden = torch.tensor(h * size).to(dtype).float().numpy()
    low, high = device_bounds(screen, hidden)
    unknown = (low == -INFINITE) & (high == INFINITE)  # which excludes nothing
    assert unknown[~np.isfinite(exact).all(1)].all()
    for found in products(exact, hidden):
        with np.errstate(invalid="ignore"):
            assert (unknown | ((low <= found) & (found <= high))).all()


def test_bounds_exclude_nearly_everything() -> None:
    """A model's own head and a hidden state as LayerNorm leaves it: few logits are left of 50257."""
    matrix = load("random:n_layer=1,n_head=12,n_embd=768", dtype="fp16").tensors["wte.weight"]
    screen, left = Screen.of(matrix), []
    rng = np.random.default_rng(5)
    for _ in range(8):
        low, high = device_bounds(screen, rng.standard_normal(768).astype(np.float16).astype(F))
        left.append(int((high >= low.max()).sum()))
    assert 1 <= np.median(left) <= 20, left


def test_halves_of_floats_are_never_smaller() -> None:
    x = torch.cat([torch.rand(1000) * torch.logspace(-38, 38, 1000), torch.tensor([0.0, np.inf, 1e-45, 3.4e38])])
    found = (upper_half(x) << 16).view(torch.float32)
    assert (found >= x).all()
    normal = x[:1000] > 1e-37
    assert (found[:1000][normal] <= x[:1000][normal] * (1 + 2**-7)).all()


def _marks_drawn(
    scores: np.ndarray, zeros: np.ndarray, temperature: float, key: int, marks: np.ndarray, noise: np.ndarray
) -> None:
    mark_drawn(scores, zeros, zeros, F(1), F(0), marks, temperature, key, noise)


_COMPILED = njit(_marks_drawn)


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_of_exact_scores_the_one_that_is_drawn_is_left(seed: int, temperature: float, spread: float) -> None:
    """Without errors of codes, what can be the largest is the largest, and what equals it up to rounding."""
    scores = (spread * np.random.default_rng(seed).standard_normal(200)).astype(F)
    zeros, marks, noise = np.zeros(200, F), np.zeros(200, np.uint8), np.zeros(200, F)
    key = np.int64(np.int32(seed - 2**31))
    _COMPILED(scores, zeros, F(temperature), key, marks, noise)
    expected = gumbel(torch.tensor([key], dtype=torch.int32), 200)[0].numpy()
    assert np.allclose(noise, expected, rtol=1e-5, atol=1e-5)
    sums = scores.astype(np.float64) / temperature + expected
    near = sums >= sums.max() - 1e-4 * (1 + abs(sums.max()))
    assert marks[sums.argmax()]
    assert not (marks[~near]).any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_the_cpu_executor_screens_without_changing_a_token(dtype: str, temperature: float, rows: int) -> None:
    weights = load(SMALL, dtype=dtype)
    head = weights.tensors["wte.weight"]
    head[7] = head[8] = head[9]  # of equals the first counts
    head[11] *= 40
    head[12] = torch.finfo(head.dtype).smallest_normal / 8
    head[13] = 0
    vocab, params = weights.config.vocab_size, Params(temperature=temperature, top_p=1, min_tokens=9, ignore_eos=False)
    rng = np.random.default_rng(rows)
    asked = [Request(rng.integers(vocab, size=3 + 2 * i).tolist(), params, 5, i, 40) for i in range(rows)]
    screened, full = CpuExecutor(weights, CPU, dtype), CpuExecutor(weights, CPU, dtype, screened=False)
    assert run(screened, asked) == run(full, asked)


def test_the_cpu_executor_says_that_a_model_is_broken_screened_or_not() -> None:
    weights = load(SMALL)
    weights.tensors["wte.weight"][5, 3] = np.nan
    for screened in (True, False):
        executor = CpuExecutor(weights, CPU, "fp32", screened=screened)
        slots = executor.allocate(1, 32)
        asked = [Request([1, 2, 3], Params(temperature=0), 0, 0, 20)]
        lanes = slots.admit(asked)
        executor.prefill(slots, spans(slots, lanes))
        assert slots.not_finite[lanes].all()


@pytest.mark.parametrize("spread", [1.0, 60.0, 400.0])
@pytest.mark.parametrize("temperature", [0.3, 0.9, 2.0])
@pytest.mark.parametrize(("dtype", "rows"), [("fp32", 1), ("fp32", 3), ("bf16", 1)])
def test_top_p_keeps_and_excludes_the_same_tokens_by_codes(
    dtype: str, rows: int, temperature: float, spread: float
) -> None:
    """From flat distributions, where nearly all tokens are kept, to those where a few are."""
    weights = load(SMALL, dtype=dtype)
    head = weights.tensors["wte.weight"]
    weights.tensors["ln_f.weight"] *= spread  # only the logits
    head[7] = head[8] = head[9]
    head[11] *= 3
    rng, vocab = np.random.default_rng(rows), weights.config.vocab_size
    shares, drawing = (0.05, 0.5, 0.9, 0.95, 0.999, 1.0), Params(temperature=temperature, min_tokens=5)
    asked = [
        Request(rng.integers(vocab, size=4 + i).tolist(), replace(drawing, top_p=float(share)), i, 0, 50)
        for i, share in enumerate(rng.permutation(shares)[: 2 * rows])
    ]
    screened, full = CpuExecutor(weights, CPU, dtype), CpuExecutor(weights, CPU, dtype, screened=False)
    for first in range(0, len(asked), rows):
        some = asked[first : first + rows]
        assert run(screened, some) == run(full, some)


def _decided(
    scores: np.ndarray, errors: np.ndarray, norms: np.ndarray, marks: np.ndarray, scale: float, top_p: float,
    drawn: int, found: np.ndarray,
) -> None:  # fmt: skip
    found[0] = is_within(scores, errors, norms, F(1), F(0), marks, scale, drawn, top_p)
    mark_above(scores, errors, norms, F(1), F(0), marks, drawn)
    found[1:] = marks


_DECIDED = njit(_decided)


def _beyond(
    scores: np.ndarray, errors: np.ndarray, norms: np.ndarray, marks: np.ndarray, scale: float, top_p: float, drawn: int
) -> bool:
    return bool(is_beyond(scores, errors, norms, F(1), F(0), marks, scale, drawn, top_p))


_BEYOND = njit(_beyond)


@given(
    seed=st.integers(0, 2**32 - 1),
    error=st.sampled_from([0.0, 1e-3, 0.1, 2.0]),
    spread=st.sampled_from([0.1, 2.0, 30.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 0.999]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(max_examples=300)
def test_what_bounds_decide_is_so(seed: int, error: float, spread: float, top_p: float, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    exact = (spread * rng.standard_normal(300)).astype(F)
    errors = (error * rng.random(300)).astype(F)
    scores = (exact + errors * rng.choice([-1, -0.5, 0, 0.5, 1], 300)).astype(F)  # as far off as they may be
    scale, share = F(1) / F(temperature), F(top_p)
    weights = np.exp((exact.astype(np.float64) - exact.max()) / temperature)
    for drawn in rng.choice(300, 8, p=weights / weights.sum()):
        truth = bool(weights[exact > exact[drawn]].sum() < top_p * weights.sum())
        marks, found = np.zeros(300, np.uint8), np.zeros(301, np.uint8)
        known = scores.copy()
        known[drawn], marks[drawn] = exact[drawn], 1
        _DECIDED(known, errors, np.zeros(300, F), marks, scale, share, int(drawn), found)
        assert truth or not found[0]
        above = found[1:] != 0
        assert above[exact > exact[drawn]].all()
        known[above], marks[above] = exact[above], 1
        beyond = _BEYOND(known, errors, np.zeros(300, F), marks, scale, share, int(drawn))
        assert not (truth and beyond)
        if error == 0 and abs(weights[exact > exact[drawn]].sum() - top_p * weights.sum()) > 1e-3 * weights.sum():
            assert bool(found[0]) is truth  # bounds without a gap decide
            assert beyond is not truth


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0.8, top_k=20),
        Params(temperature=0.8, min_p=0.01),
        Params(temperature=0, repetition_penalty=1.2),
    ],
)
def test_what_needs_every_logit_gets_every_logit(params: Params) -> None:
    """Top-k, min-p and penalties: codes are not looked at."""
    weights = load(SMALL)
    executor = CpuExecutor(weights, CPU, "fp32")
    asked = [Request([1, 2, 3, 4], params, 3, 0, 40)]
    expected = run(CpuExecutor(weights, CPU, "fp32", screened=False), asked)
    assert executor._screen is not None
    executor._screen.codes.zero_()
    assert run(executor, asked) == expected
