"""Sampling compared with `transformers`' own processors, and drawn frequencies with the distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SMALL
from warpline import LLM
from warpline.config import ModelConfig, SamplingParams
from warpline.engine.executors import sampling
from warpline.engine.request import Request
from warpline.engine.slots import Slots
from warpline.errors import ConfigError
from warpline.kernels.noise import gumbel, noise_keys

VOCAB = 997  # more than the short list on a CPU
CONFIG = ModelConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=VOCAB, n_positions=64, eos_token_id=5)


def begin(params: list[SamplingParams], prompts: list[list[int]] | None = None) -> Slots:
    """Admit a request to a slot each, in order."""
    slots = Slots(CONFIG, len(params), 64, device=torch.device("cpu"), dtype=torch.float32)
    prompts = prompts or [[1, 2, 3]] * len(params)
    rows = zip(prompts, params, strict=True)
    slots.admit([Request(prompt, p, p.seed or 0, 0, min(64, len(prompt) + p.max_tokens)) for prompt, p in rows])
    return slots


def records(params: list[SamplingParams], prompts: list[list[int]] | None = None) -> sampling.Records:
    return sampling.Records(begin(params, prompts), range(len(params)))


def advance(slots: Slots, logits: torch.Tensor) -> None:
    sampling.advance(slots, range(slots.count), logits)


def keys(stream: int, count: int) -> torch.Tensor:
    return torch.from_numpy(noise_keys(np.array([stream], np.uint64), count)[0])


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.8, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 2, 10, 255, 256, 257, 500, 996, 997, 5000]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.5]),
        "min_tokens": st.sampled_from([0, 2]),
    }
)


def by_transformers(logits: torch.Tensor, prompt: list[int], params: SamplingParams) -> torch.Tensor:
    processors: list[Any] = []
    if params.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(penalty=params.repetition_penalty))
    if params.min_tokens:
        processors.append(
            transformers.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, eos_token_id=5)
        )
    processors.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(transformers.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([prompt])
    for processor in processors:
        logits = processor(ids, logits)
    return logits.softmax(dim=-1)


@settings(max_examples=40)
@given(
    st.floats(-2, 2), st.floats(-2, 2), st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=20),
    st.sampled_from([1.0, 1.5]), st.integers(0, 2**31),
)  # fmt: skip
def test_penalties_and_biases_are_openais_formula(
    presence: float, frequency: float, bias: dict[int, float], repetition: float, seed: int
) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, plus the bias; of tokens behind the prompt, in float64."""
    params = SamplingParams(
        temperature=0, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias,
        repetition_penalty=repetition, ignore_eos=True,
    )  # fmt: skip
    slots, plain = begin([params], [[1, 2, 2]]), begin([SamplingParams(temperature=0)])
    had: list[int] = []
    for step in range(5):
        logits = random_logits(1, seed + step // 2)  # the same twice, so that a token may be repeated
        expected = logits.double()
        for token in {1, 2, *had}:
            expected[0, token] *= 1 / repetition if expected[0, token] > 0 else repetition
        for token in range(VOCAB):
            count = had.count(token)
            expected[0, token] += bias.get(token, 0.0) - count * frequency - (count > 0) * presence
        rows = sampling.Records(slots, [0])
        assert torch.allclose(sampling.adjust(logits, rows).double(), expected, rtol=0, atol=2e-5)
        advance(slots, logits)
        advance(plain, logits)
        had.append(int(slots.tokens[0, 3 + step]))
    assert not plain.counts.any()  # not counted without penalties


def test_biases_of_tokens_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="token id 50257, outside"):
        LLM(SMALL, device="cpu").generate([1], SamplingParams(logit_bias={3: 1.0, 50257: 1.0}))


def test_what_is_banned_never_comes_and_what_is_favoured_always() -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias={7: 100.0}, ignore_eos=True)
        slots = begin([params])
        advance(slots, random_logits(1, 3).clamp(max=5))
        assert slots.tokens[0, 3] == 7
        best = int(random_logits(1, 4).argmax())
        slots = begin([SamplingParams(temperature=temperature, top_p=1.0, logit_bias={best: -100.0}, seed=1)])
        advance(slots, random_logits(1, 4))
        assert slots.tokens[0, 3] != best


@settings(max_examples=150)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 2**31))
def test_distribution_equals_transformers(choices: list[dict[str, Any]], seed: int) -> None:
    params = [SamplingParams(**choice) for choice in choices]
    prompts = [[1, 2, 3, 5], [7], [5, 5], [90, 1, 7]][: len(params)]
    logits = random_logits(len(params), seed)
    rows = records(params, prompts)
    adjusted = sampling.adjust(logits, rows)
    ours = sampling.truncate(adjusted / rows.temperature[:, None], rows).softmax(dim=-1)
    for row, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        expected = by_transformers(logits[row : row + 1].clone(), prompt, p)[0]
        if not torch.equal(ours[row] > 0, expected > 0):
            assert _on_the_brink(adjusted[row] / p.temperature, p, (ours[row] > 0) ^ (expected > 0))
            continue
        assert (ours[row] - expected).abs().max() < 1e-5


def _on_the_brink(scaled: torch.Tensor, params: SamplingParams, disputed: torch.Tensor) -> bool:
    """Whether each token kept by one side only is within rounding of the edge of top-p or min-p."""
    exact = scaled.double()
    if params.top_k:
        exact = exact.where(exact >= exact.topk(min(params.top_k, VOCAB)).values[-1], -torch.inf)
    probability = exact.softmax(dim=-1)
    for token in disputed.nonzero().flatten():
        likelier = probability[probability > probability[token]].sum()
        at_top_p = (likelier - params.top_p).abs() < 1e-6
        at_min_p = (probability[token] / probability.max() - params.min_p).abs() < 1e-6
        if not at_top_p and not at_min_p:
            return False
    return True


def test_edges_of_top_k_and_top_p_are_exact() -> None:
    """With powers of two nothing is rounded, so an off-by-one error shows."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, :8] = torch.arange(8, 0, -1) * math.log(2)  # 1/2, 1/4, … of 255/256
    for k in (1, 3, 7):
        rows = records([SamplingParams(temperature=1.0, top_k=k, top_p=1.0)])
        assert int((sampling.truncate(logits, rows) > -torch.inf).sum()) == k
    for top_p, kept in ((0.3, 1), (0.51, 2), (0.74, 2), (0.77, 3), (0.9, 4), (0.999, 8)):
        rows = records([SamplingParams(temperature=1.0, top_p=top_p)])
        assert int((sampling.truncate(logits, rows) > -torch.inf).sum()) == kept, top_p
    for min_p, kept in ((0.6, 1), (0.4, 2), (0.2, 3)):
        rows = records([SamplingParams(temperature=1.0, top_p=1.0, min_p=min_p)])
        assert int((sampling.truncate(logits, rows) > -torch.inf).sum()) == kept, min_p


@pytest.mark.parametrize(
    "settings_",
    [
        {"temperature": 1.0, "top_p": 1.0},
        {"temperature": 0.7, "top_k": 8, "top_p": 1.0},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.3},
    ],
)
def test_drawn_frequencies_follow_the_distribution(settings_: dict[str, Any]) -> None:
    draws = 40_000
    params = SamplingParams(**settings_)
    rows = records([params])
    logits = random_logits(1, 11)
    probability = (
        sampling.truncate(sampling.adjust(logits, rows) / params.temperature, rows).softmax(dim=-1)[0].double()
    )
    big = records([params] * 100)
    counts = torch.zeros(VOCAB, dtype=torch.long)
    for block in range(draws // 100):
        drawn = sampling.sample(sampling.adjust(logits.expand(100, -1), big), big, keys(block, 100))
        counts += torch.bincount(drawn, minlength=VOCAB)
    assert counts[probability == 0].sum() == 0
    likely = probability * draws >= 5
    expected = torch.cat([probability[likely] * draws, (probability[~likely].sum() * draws)[None]])
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]]).double()
    chi2 = ((observed - expected) ** 2 / expected.clamp(min=1e-9))[expected > 0].sum()
    freedom = max(int((expected > 0).sum()) - 1, 1)
    # Wilson–Hilferty: six standard deviations above the mean of the chi-square distribution.
    bound = freedom * (1 - 2 / (9 * freedom) + 6 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi2 < bound


@settings(max_examples=60)
@given(st.lists(PARAMS, min_size=2, max_size=5), st.integers(0, 2**31))
def test_a_row_does_not_see_its_neighbours(choices: list[dict[str, Any]], seed: int) -> None:
    params = [SamplingParams(**choice, seed=i) for i, choice in enumerate(choices)]
    params.append(SamplingParams(temperature=0))
    logits = random_logits(len(params), seed)
    together = begin(params)
    advance(together, logits)
    for row, p in enumerate(params):
        alone = begin([p])
        advance(alone, logits[row : row + 1])
        assert alone.tokens[0, 3] == together.tokens[row, 3]


def test_noise_is_gumbel_and_independent_between_tokens_and_positions() -> None:
    noise = gumbel(keys(1, 400), VOCAB).double()
    assert noise.isfinite().all()
    count = noise.numel()
    # Euler's constant, π²/6, and the exponential distribution that every Gumbel variable hides.
    assert noise.mean() == pytest.approx(0.5772157, abs=6 * (1.645 / count) ** 0.5)
    assert noise.var() == pytest.approx(1.644934, rel=6 * (4.4 / count) ** 0.5)
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    distance = (uniform - torch.arange(1, count + 1) / count).abs().max()
    assert distance < 2.5 / count**0.5  # Kolmogorov–Smirnov; exceeded once in 100,000
    centred = noise - noise.mean()
    for shifted in (centred[:, :-1] * centred[:, 1:], centred[:-1] * centred[1:]):
        assert shifted.mean().abs() < 6 * 1.645 / shifted.numel() ** 0.5


def test_noise_of_known_keys() -> None:
    """The hash is a contract between executors: these values were computed with plain Python integers."""

    def by_hand(key: int, token: int) -> float:
        x = (key + token) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        x ^= x >> 16
        return -math.log(-math.log1p(-(x + 0.5) / 2**32))

    known = [0, 1, -1, 2**31 - 1, -(2**31), 123456789]
    noise = gumbel(torch.tensor(known, dtype=torch.int32), 50257)
    for row, key in enumerate(known):
        for token in (0, 1, 255, 256, 50256):
            assert float(noise[row, token]) == pytest.approx(by_hand(key, token), rel=1e-4, abs=1e-4)


def test_no_noise_makes_a_token_impossible() -> None:
    """The hash of this key for token 100 is so large that float32 rounds it up to 1."""
    unlucky = torch.tensor([-2131044562 - 100], dtype=torch.int32)
    assert gumbel(unlucky, VOCAB).isfinite().all()
    logits = torch.zeros(1, VOCAB)
    logits[0, 100] = 1
    rows = records([SamplingParams(temperature=1.0, top_k=1, top_p=1.0)])
    assert sampling.sample(logits, rows, unlucky).tolist() == [100]


def test_impossible_tokens_are_never_drawn() -> None:
    rows = records([SamplingParams(temperature=1.0, top_k=3, top_p=1.0)] * 500)
    logits = random_logits(1, 3).expand(500, -1)
    best = set(logits[0].topk(3).indices.tolist())
    assert set(sampling.sample(logits, rows, keys(1, 500)).tolist()) == best


def test_forced_tokens_are_taken() -> None:
    slots = Slots(CONFIG, 1, 64, device=torch.device("cpu"), dtype=torch.float32)
    slots.admit([Request([1], SamplingParams(temperature=0, logprobs=0), 0, 0, 10, forced=[7, 8])])
    logits = random_logits(1, 5)
    for _ in range(3):
        advance(slots, logits)
    assert slots.tokens[0, :4].tolist() == [1, 7, 8, int(logits.argmax())]
    assert slots.logprob is not None
    assert slots.logprob[0, 1:3].tolist() == pytest.approx(logits.log_softmax(-1)[0, [7, 8]].tolist())


def test_done_slots_stand_still() -> None:
    slots = begin([SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=0, max_tokens=5)])
    logits = random_logits(2, 5)
    for _ in range(4):
        advance(slots, logits)
    assert slots.length[:2].tolist() == [5, 7]
    assert slots.done[:2].tolist() == [True, False]


def test_a_done_slot_keeps_its_logprobs() -> None:
    slots = begin([SamplingParams(temperature=0, max_tokens=1, logprobs=2), SamplingParams(temperature=0, logprobs=1)])
    advance(slots, random_logits(2, 5))
    buffers = (slots.logprob, slots.top_logprob, slots.top_token)
    before = [buffer[0].clone() for buffer in buffers if buffer is not None]
    advance(slots, random_logits(2, 6))
    assert len(before) == 3
    assert all(torch.equal(buffer[0], kept) for buffer, kept in zip(buffers, before, strict=True) if buffer is not None)


def test_lanes_are_any_slots_and_the_others_stay_as_they_are() -> None:
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, logprobs=2) for i in range(5)]
    slots, logits = begin(params), random_logits(5, 7)
    expected = begin(params)
    advance(expected, logits)
    sampling.advance(slots, [3, 0, 4], logits[[3, 0, 4]])
    assert slots.length[:5].tolist() == [4, 3, 3, 4, 4]
    for name in ("tokens", "logprob", "top_logprob", "top_token"):
        found, right = getattr(slots, name), getattr(expected, name)
        assert torch.equal(found[[3, 0, 4]], right[[3, 0, 4]]), name
        assert not found[[1, 2], 3:].any(), name


def test_end_of_text_ends_a_sequence_unless_ignored() -> None:
    slots = begin([SamplingParams(temperature=0), SamplingParams(temperature=0, ignore_eos=True)])
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 9
    advance(slots, logits)
    assert slots.done[:2].tolist() == [True, False]
    advance(slots, logits)
    assert slots.length[:2].tolist() == [4, 5]


def test_logits_that_are_not_finite_are_noticed() -> None:
    slots, logits = begin([SamplingParams(temperature=0)] * 3), random_logits(3, 2)
    logits[1, 100], logits[2] = torch.nan, -torch.inf
    advance(slots, logits)
    assert slots.not_finite[:3].tolist() == [False, True, True]


def test_random_numbers_depend_on_seed_prompt_sample_and_position_alone() -> None:
    params = SamplingParams(temperature=1)

    def stream(seed: int, prompt: list[int], sample: int, limit: int = 9) -> int:
        return Request(prompt, params, seed, sample, limit).stream

    assert stream(7, [1, 2], 1) == stream(7, [1, 2], 1, limit=60)
    assert len({stream(7, [1, 2], 1), stream(8, [1, 2], 1), stream(7, [1, 2], 0), stream(7, [1], 1)}) == 4
    long, short = keys(stream(7, [1], 1), 100), keys(stream(7, [1], 1), 10)
    assert torch.equal(long[:10], short)
    assert not torch.equal(keys(stream(8, [1], 1), 10), short)
    assert keys(2**64 - 1, 4).dtype == torch.int32


def test_a_row_that_is_done_is_not_broken_by_what_it_computes() -> None:
    slots = begin([SamplingParams(max_tokens=1), SamplingParams(max_tokens=5)])
    advance(slots, random_logits(2, 1))
    assert slots.done[:2].tolist() == [True, False]
    advance(slots, torch.full((2, VOCAB), float("nan")))
    assert slots.not_finite[:2].tolist() == [False, True]
