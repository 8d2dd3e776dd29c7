"""`LLM` from the outside: compared with `transformers`, batched compared with alone, and the ways a text can end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import SMALL, make_model, make_weights
from tests.model.test_gpt2 import hf_model
from warpline import LLM, Completion, SamplingParams, hardware
from warpline.config import ModelConfig
from warpline.engine import device
from warpline.errors import ConfigError, DeviceError, ModelError
from warpline.model.weights import Weights, load

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
CONFIG = ModelConfig(n_layer=3, n_head=4, n_embd=64, n_positions=160)


@pytest.fixture(scope="module", params=[1, 3, 8], ids=lambda chunk: f"chunk{chunk}")
def llm(request: pytest.FixtureRequest) -> LLM:
    """One model, whose tokens the host reads after every step, or less often as on a GPU."""
    model = LLM(SMALL)
    model.engine.scheduler.chunk = model.engine.scheduler.most_steps = request.param
    return model


@pytest.fixture(params=["cpu", "torch"])
def sharp(request: pytest.FixtureRequest, save_folder: Callable[[Weights], Path]) -> tuple[LLM, Weights]:
    """A model with clear greedy choices, loaded from a folder."""
    weights = make_weights(CONFIG)
    return LLM(str(save_folder(weights)), device="cpu", executor=request.param), weights


def random_prompts(count: int, longest: int, vocab: int = 50257, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_greedy_equals_transformers(sharp: tuple[LLM, Weights]) -> None:
    """50 prompts of unequal length × 100 tokens: ours in batches, those of transformers one by one."""
    llm, weights = sharp
    prompts = random_prompts(50, 59)
    ours = llm.generate(prompts, replace(GREEDY, max_tokens=100))
    for completion, expected in zip(ours, _continued(weights, prompts), strict=True):
        assert list(completion.token_ids) == expected
    assert len({c.token_ids for c in ours}) > 40  # the comparison is not one text fifty times


_theirs: list[list[int]] = []


def _continued(weights: Weights, prompts: list[list[int]]) -> list[list[int]]:
    """Return the continuation by transformers, cached for the next executor."""
    hf = hf_model(weights)
    for prompt in prompts[len(_theirs) :]:
        found = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=100,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        _theirs.append(found[0, len(prompt) :].tolist())
    return _theirs


def test_greedy_equals_no_cache_at_all(sharp: tuple[LLM, Weights]) -> None:
    llm, weights = sharp
    model = make_model(weights)
    for prompt in random_prompts(3, 20, seed=5):
        ids = list(prompt)
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        (completion,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert list(completion.token_ids) == ids[len(prompt) :]


@settings(max_examples=15)
@given(data=st.data())
def test_batched_equals_alone(llm: LLM, data: st.DataObject) -> None:
    prompts = random_prompts(data.draw(st.integers(2, 6)), 60, seed=data.draw(st.integers(0, 999)))
    params = [
        SamplingParams(
            max_tokens=data.draw(st.integers(1, 30)),
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
            top_k=data.draw(st.sampled_from([0, 5])),
            top_p=data.draw(st.sampled_from([0.9, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.2])),
            seed=data.draw(st.integers(0, 99)),
        )
        for _ in prompts
    ]
    together = llm.generate(prompts, params)
    for prompt, p, completion in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, p)
        assert (alone.token_ids, alone.text, alone.finish_reason) == (
            completion.token_ids,
            completion.text,
            completion.finish_reason,
        )


def test_more_prompts_than_a_batch_run_in_turns() -> None:
    few = LLM(SMALL, max_batch=3)
    prompts = random_prompts(8, 9)
    assert texts(few.generate(prompts, GREEDY)) == texts(LLM(SMALL).generate(prompts, GREEDY))


def texts(completions: list[Completion]) -> list[str]:
    return [completion.text for completion in completions]


@pytest.mark.parametrize("window", [1, 3, 10])
def test_window(window: int) -> None:
    windowed, weights = LLM(SMALL, window=window), load(SMALL)
    assert windowed.config.window == window
    (prompt,) = random_prompts(1, 40, seed=3)
    (completion,) = windowed.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    model = make_model(replace(weights, config=windowed.config))
    ids = [*prompt, *completion.token_ids]
    expected = model(torch.tensor([ids]))[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    assert list(completion.token_ids) == expected


def test_seed(llm: LLM) -> None:
    def draw(seed: int | None) -> str:
        return llm.generate("Once", SamplingParams(temperature=1.0, max_tokens=20, seed=seed))[0].text

    assert draw(1) == draw(1)
    assert len({draw(1), draw(2), draw(None), draw(None)}) == 4
    (free,) = llm.generate("Once", SamplingParams(temperature=1.0, max_tokens=20))
    assert draw(free.seed) == free.text  # the drawn seed is reported


def test_n(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, seed=4)
    results = llm.generate(["One", "Two"], params)
    assert [c.index for c in results] == [0, 1, 2, 0, 1, 2]
    assert [c.prompt for c in results] == ["One"] * 3 + ["Two"] * 3
    assert len(set(texts(results))) == 6
    assert texts(results) == texts(llm.generate(["One", "Two"], params))


def test_stream_equals_generate(llm: LLM) -> None:
    for seed in range(5):
        params = SamplingParams(temperature=1.0, max_tokens=40, seed=seed)
        stream = llm.stream("Hello", params)
        assert stream.completion is None
        pieces = list(stream)
        (whole,) = llm.generate("Hello", params)
        assert "".join(pieces) == whole.text
        assert len(pieces) > len(whole.token_ids) / llm.engine.scheduler.chunk / 2
        assert stream.completion is not None
        assert stream.completion.token_ids == whole.token_ids
    with pytest.raises(ConfigError, match="n > 1"):
        llm.stream("Hello", SamplingParams(n=2))


def test_streams_do_not_disturb_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=9)
    expected = texts(llm.generate(["A dog", "The cat"], params))
    first, second = llm.stream("A dog", params), llm.stream("The cat", params)
    woven = ["", ""]
    for one, two in zip(first, second, strict=False):
        woven[0] += one
        woven[1] += two
        llm.generate("Something else", SamplingParams(max_tokens=2))
    # zip would take one piece too many from the first stream if the second ended before it.
    assert expected[0].startswith(woven[0])
    assert expected[0].endswith("".join(first))
    assert woven[1] + "".join(second) == expected[1]
    dropped = llm.stream("A dog", params)
    next(dropped)
    dropped.close()
    assert texts(llm.generate(["A dog", "The cat"], params)) == expected


def test_stop_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3)
    (whole,) = llm.generate("Hello", params)
    for start, size in ((20, 1), (30, 4), (50, 12)):
        stop = whole.text[start : start + size]
        ended = SamplingParams(temperature=1.0, max_tokens=60, seed=3, stop=["never there", stop])
        (completion,) = llm.generate("Hello", ended)
        assert completion.text == whole.text[: whole.text.index(stop)]
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) < 60
        assert "".join(llm.stream("Hello", ended)) == completion.text


def test_stop_text_that_only_seems_to_begin(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", SamplingParams(temperature=1.0, max_tokens=20, seed=3))
    almost = whole.text[-3:] + "not what follows"
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=3, stop=almost)
    assert "".join(llm.stream("Hello", params)) == whole.text


def test_end_of_text_and_min_tokens(save_folder: Callable[[Weights], Path]) -> None:
    """The model's likeliest token is the end of text."""
    weights = make_weights(CONFIG)
    weights.tensors["wte.weight"][50256] = 0
    weights.tensors["ln_f.bias"][:] = 1
    weights.tensors["wte.weight"][50256, :] = 5
    llm = LLM(str(save_folder(weights)))
    (ended,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=30))
    assert ended.finish_reason == "stop"
    assert ended.token_ids == (50256,)
    assert ended.text == ""
    (later,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=30, min_tokens=4))
    assert len(later.token_ids) == 5
    assert later.token_ids[-1] == 50256
    assert later.timings.decode_steps == 4  # steps after the end do not count
    (never,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert never.finish_reason == "length"
    assert len(never.token_ids) == 30
    assert "<|endoftext|>" not in never.text


def test_min_tokens_holds_back_stop_texts(llm: LLM) -> None:
    base = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    (whole,) = llm.generate("Hello", base)
    stop = whole.text[2:5]
    (completion,) = llm.generate(
        "Hello", SamplingParams(temperature=1.0, max_tokens=30, min_tokens=25, seed=3, stop=stop, ignore_eos=True)
    )
    assert len(completion.token_ids) >= 25


def test_logprobs(sharp: tuple[LLM, Weights]) -> None:
    llm, weights = sharp
    model = make_model(weights)
    prompts = random_prompts(3, 12, seed=8)
    params = [SamplingParams(temperature=1.0, max_tokens=9, seed=1, logprobs=k, ignore_eos=True) for k in (0, 5, 2)]
    for prompt, p, completion in zip(prompts, params, llm.generate(prompts, params), strict=True):
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        expected = model(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)
        for entry, row in zip(completion.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert p.logprobs is not None
            assert [token for token, _ in entry.top] == row.topk(p.logprobs).indices.tolist()
    (without,) = llm.generate(prompts[0], GREEDY)
    assert without.logprobs is None


def test_logprobs_of_a_row_that_ends_at_the_last_slot(llm: LLM) -> None:
    """While its neighbour continues, its last slot must stay unchanged."""
    params = SamplingParams(temperature=0, max_tokens=80, logprobs=2, ignore_eos=True)
    long, short = random_prompts(1, 1)[0] * 93, random_prompts(1, 1, seed=4)[0] * 10
    together = llm.generate([long, short], params)
    (alone,) = llm.generate(long, params)
    assert together[0].logprobs is not None
    assert alone.logprobs is not None
    for ours, expected in zip(together[0].logprobs, alone.logprobs, strict=True):
        assert ours.logprob == pytest.approx(expected.logprob, abs=1e-6)
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in expected.top], abs=1e-6)


def test_score_equals_the_model(sharp: tuple[LLM, Weights]) -> None:
    """Scoring runs through decode steps; one uncached forward pass is the reference."""
    llm, weights = sharp
    texts = ["A short one.", "Another text, a little longer than the first.", "x"]
    model = make_model(weights)
    nats, count = 0.0, 0
    for text in texts:
        ids = [50256, *llm.tokenizer.encode(text), 50256]
        logprob = model(torch.tensor([ids]))[0].log_softmax(-1)
        nats -= float(sum(logprob[i, token] for i, token in enumerate(ids[1:])))
        count += len(ids) - 1
    scored = llm.score(texts)
    assert (scored.tokens, scored.characters) == (count, sum(map(len, texts)))
    assert scored.nats == pytest.approx(nats, rel=1e-5)
    with pytest.raises(ConfigError, match="split it"):
        llm.score(["word " * 400])


def test_broken_weights_are_noticed(save_folder: Callable[[Weights], Path]) -> None:
    weights = make_weights(CONFIG)
    weights.tensors["h.1.mlp.c_fc.bias"][3] = torch.nan
    broken = LLM(str(save_folder(weights)))
    with pytest.raises(ModelError, match="weights are damaged"):
        broken.generate("Hello", GREEDY)


def test_slots_serve_requests_of_all_shapes() -> None:
    """What an executor captured must stay valid: nothing is allocated again."""
    llm = LLM(SMALL)
    llm.generate(random_prompts(1, 1)[0] * 60, GREEDY)
    slots = llm.engine._slots
    assert slots is not None
    logprobs = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    llm.generate(random_prompts(5, 9), logprobs)
    buffer = slots.top_token
    for request in (random_prompts(1, 1)[0] * 60, random_prompts(5, 3)):
        llm.generate(request, logprobs)
        assert llm.engine._slots is slots
        assert slots.top_token is buffer
        assert slots.free == llm.max_batch


def test_context_is_filled_to_the_last_slot_and_no_further(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    prompt = random_prompts(1, 1)[0] * 90
    (completion,) = llm.generate(prompt, SamplingParams(max_tokens=1000, ignore_eos=True))
    assert len(completion.token_ids) == 6
    assert completion.finish_reason == "length"
    assert "context is 96 tokens: at most 6 of the 1,000" in caplog.text
    caplog.clear()
    for full in (prompt + prompt[:5], prompt + prompt[:6]):  # the last token needs no position of its own
        (one,) = llm.generate(full, SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(one.token_ids) == 1
    assert not caplog.text
    with pytest.raises(ConfigError, match="97 tokens, but the model's context is 96: shorten it"):
        llm.generate(prompt + prompt[:7], GREEDY)


def test_a_limit_of_many_prompts_is_said_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    llm.generate([[1] * 90] * 20 + [[2] * 80], SamplingParams(max_tokens=9, ignore_eos=True))
    assert [r.getMessage() for r in caplog.records] == [
        "the model's context is 96 tokens: of 20 prompts at most 6 of the 9 asked for will be generated"
    ]


IDS = [5, 6, 7]
MANY = [np.array(IDS), torch.tensor(IDS), np.array([IDS], np.uint8), torch.tensor([IDS, IDS]), (5, 6, 7)]


@pytest.mark.parametrize("prompts", [*MANY, [torch.tensor(IDS), IDS, np.array(IDS, np.int32)]], ids=repr)
def test_ids_in_arrays(llm: LLM, prompts: Any) -> None:
    (expected,) = llm.generate(IDS, GREEDY)
    found = llm.generate(prompts, GREEDY)
    assert {(one.token_ids, one.prompt_token_ids) for one in found} == {(expected.token_ids, (5, 6, 7))}


BAD = [np.array([1.5]), [torch.tensor([[1]])], torch.zeros(0, dtype=torch.long), [torch.tensor(3)], np.array(["a"])]


@pytest.mark.parametrize("prompt", ["", [], [-1], [50257], [1.5], [["a"]], [[[1, 2]]], [2**70], [None], "\ud800", *BAD])
def test_impossible_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ConfigError):
        llm.generate(prompt, GREEDY)


def test_impossible_params(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="2 prompts came with 1 SamplingParams"):
        llm.generate(["a", "b"], [GREEDY])
    others: list[Any] = [{"max_tokens": 3}, 3, [None]]
    for params in others:
        with pytest.raises(ConfigError, match="params must be SamplingParams"):
            llm.submit("a", params)


def test_a_refused_request_loses_nothing(llm: LLM) -> None:
    before = texts(llm.generate(["Hello"], GREEDY))
    with pytest.raises(ConfigError):
        llm.generate(["Hello", ""], GREEDY)
    assert texts(llm.generate(["Hello"], GREEDY)) == before


def test_special_token_in_a_prompt(llm: LLM) -> None:
    (completion,) = llm.generate("<|endoftext|>", SamplingParams(max_tokens=3))
    assert completion.prompt_token_ids == (50256,)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_runs(dtype: str) -> None:
    half = LLM(SMALL, dtype=dtype)
    (completion,) = half.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(completion.token_ids) == 8
    assert half.dtype == dtype


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"unknown executor 'tosch'.*did you mean 'torch'"):
        LLM(SMALL, executor="tosch")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA GPU"):
            LLM(SMALL, device="cuda")
    with pytest.raises(DeviceError, match="not enough memory"):
        LLM("random:n_embd=2000000000,n_head=2,n_layer=1")  # 400 TB for the first tensor


def test_bf16_on_a_gpu_that_lacks_it_is_refused() -> None:
    """No such GPU is available; its datasheet entry is enough for the refusal."""
    turing = hardware.known_gpu("t4")
    assert turing is not None
    with pytest.raises(DeviceError, match=r"Tesla T4 \(sm_75\) cannot compute in bf16.*use fp16 or fp32"):
        device.dtype_of("bf16", turing, None)
    assert device.dtype_of("auto", turing, None) == "fp16"
