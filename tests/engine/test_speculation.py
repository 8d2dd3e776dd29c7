"""Several tokens a pass: the text is the same as without drafts, whatever the settings, and drafts are correct."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.arrivals import random_params
from tests.engine.running import spans
from tests.engine.test_cpu_invariance import DTYPES, seen
from tests.model.test_stories import held_out
from warpline import LLM, SamplingParams
from warpline.config import EngineConfig
from warpline.engine.executors import create
from warpline.engine.executors.cpu import table as tables
from warpline.engine.request import Request
from warpline.errors import ConfigError
from warpline.kernels.cpu import draft, sizes
from warpline.kernels.cpu.words import Word
from warpline.model.weights import load

#: Small vocabularies lead to repetition, so that many drafts are right.
MODEL = "random:n_layer=2,n_head=2,n_embd=48,n_positions=200,vocab_size=90"
EOS = "random:n_layer=2,n_head=2,n_embd=48,n_positions=200,vocab_size=90,eos_token_id=7"
SETTINGS = (
    SamplingParams(temperature=0, max_tokens=120),
    SamplingParams(temperature=0.3, top_p=1.0, max_tokens=120, seed=1),
    SamplingParams(temperature=0.4, top_k=8, top_p=0.9, max_tokens=120, seed=2),
    SamplingParams(temperature=0.5, min_p=0.05, min_tokens=40, max_tokens=120, seed=3, stop=("ab", "3")),
    SamplingParams(temperature=0.2, repetition_penalty=1.05, logprobs=3, max_tokens=100, seed=4),
    SamplingParams(temperature=0, presence_penalty=0.4, frequency_penalty=0.1, logit_bias={3: 1.0}, max_tokens=100),
)


def prompts_of(count: int, vocab: int) -> list[list[int]]:
    rng = random.Random(4)
    found = []
    for _ in range(count):
        unit = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))]
        found.append((unit * 8)[: rng.randint(1, 40)])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", [MODEL, EOS])
def test_the_text_is_the_same_with_drafts(model: str, dtype: str) -> None:
    """Tokens, texts, reasons to end and log-probabilities to the bit; one by one, together, and as they come."""
    plain = LLM(model, device="cpu", dtype=dtype, deterministic="batch", max_batch=6)
    drafting = LLM(
        model, device="cpu", dtype=dtype, deterministic="batch", max_batch=6, speculate="ngram", speculative_tokens=5
    )
    prompts = prompts_of(10, 90)
    accepted = 0
    for params in SETTINGS:
        expected = plain.generate(prompts, params)
        together = drafting.generate(prompts, params)
        assert list(map(seen, together)) == list(map(seen, expected))
        timings = together[0].timings
        accepted += timings.accepted
        assert timings.accepted <= timings.drafted
        assert timings.tokens_per_pass is not None
        for prompt, its in zip(prompts[:3], expected[:3], strict=True):
            assert seen(drafting.generate(prompt, params)[0]) == seen(its)
            stream = drafting.stream(prompt, params)
            assert "".join(stream) == its.text
    assert accepted > 200


@pytest.mark.parametrize(("lanes", "drafts", "together"), [(1, 3, False), (2, 3, True), (4, 0, False), (5, 0, True)])
def test_a_thread_prepares_few_rows_only_by_itself(lanes: int, drafts: int, together: bool) -> None:
    """Its memory has room for a few; drafts are rows too."""
    asked = EngineConfig(speculate="ngram", speculative_tokens=drafts) if drafts else EngineConfig()
    executor = create("cpu", load(MODEL), torch.device("cpu"), "fp32", asked)
    slots = executor.allocate(lanes, 40)
    found = slots.admit([Request([1, 2, 3], SETTINGS[0], 0, i, 30) for i in range(lanes)])
    executor.prefill(slots, spans(slots, found))
    call = executor._call(slots)  # type: ignore[attr-defined]
    call.newest(slots, found, 1, chooses=True)
    assert bool(call._words[Word.PREPARING] > 0) is together


def test_sequences_come_and_go_with_drafts() -> None:
    rng = random.Random(8)
    plain = LLM(MODEL, device="cpu", dtype="fp32", deterministic="batch", max_batch=5)
    drafting = LLM(MODEL, device="cpu", dtype="fp32", deterministic="batch", max_batch=5, speculate="ngram", threads=3)
    prompts = prompts_of(40, 90)
    params = [replace(random_params(rng, longest=90), stop=()) for _ in prompts]
    handles = []
    for prompt, its in zip(prompts, params, strict=True):
        handles.append(drafting.submit(prompt, its))
        if rng.random() < 0.3:
            handles[rng.randrange(len(handles))].result(timeout=60)
    for handle, prompt, its in zip(handles, prompts, params, strict=True):
        assert seen(handle.result(timeout=60)) == seen(plain.generate(prompt, its)[0])
    assert drafting.engine.stats.accepted <= drafting.engine.stats.drafted


def test_a_text_that_is_given_is_scored_the_same_in_fewer_passes() -> None:
    """Known tokens work like drafts."""
    texts = held_out()[:2]
    plain = LLM("stories", device="cpu", dtype="int8", deterministic="batch")
    drafting = LLM("stories", device="cpu", dtype="int8", deterministic="batch", speculate="ngram")
    assert drafting.score(texts) == plain.score(texts)
    assert drafting.engine.stats.steps < 0.3 * plain.engine.stats.steps


def test_a_sequence_never_exceeds_its_limit() -> None:
    llm = LLM(MODEL, device="cpu", dtype="fp32", speculate="ngram", speculative_tokens=7)
    for count in range(1, 14):
        (found,) = llm.generate([5, 6] * 10, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        assert len(found.token_ids) == count
    (whole,) = llm.generate([5, 6] * 10, SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    assert len(whole.token_ids) == llm.config.n_positions - 20


def test_tables_are_kept_and_damaged_ones_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ngrams" / "one.bin"
    table = tables.load(path)
    assert not table.any()
    table[5] = 77
    tables.save(path, table)
    assert np.array_equal(tables.load(path), table)
    content = path.read_bytes()
    for bad in (content[:-1], content[:40] + b"x" + content[41:], b"", b"other" + content[5:]):
        path.write_bytes(bad)
        caplog.clear()
        assert not tables.load(path).any()
        assert len(caplog.records) == 1


def test_a_table_makes_no_text_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    prompts = prompts_of(6, 90)
    expected = [
        seen(c) for c in LLM(MODEL, device="cpu", executor="cpu", deterministic="batch").generate(prompts, params)
    ]
    accepted = []
    for _ in range(2):
        llm = LLM(MODEL, device="cpu", deterministic="batch", speculate="ngram", speculative_table=True)
        for _ in range(3):
            found = llm.generate(prompts, params)
            assert [seen(c) for c in found] == expected
            accepted.append(found[0].timings.accepted)
        del llm, found
    assert accepted[2] > accepted[0]
    assert len(list((tmp_path / "ngrams").glob("*.bin"))) == 1


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="the torch executor has no speculate='ngram'"):
        LLM(MODEL, device="cpu", executor="torch", speculate="ngram")
    for count in (0, 8, True):
        with pytest.raises(ConfigError, match="speculative_tokens must be a whole number from 1 to 7"):
            LLM(MODEL, device="cpu", speculative_tokens=count)
    with pytest.raises(ConfigError, match="speculative_table needs speculate='ngram'"):
        LLM(MODEL, device="cpu", speculative_table=True)


# --- the drafter, as it is written ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=24))
def test_the_longest_match_is_found(tokens: list[int]) -> None:
    """Compared with trying all positions and lengths."""
    ends = range(1, len(tokens))
    longest = {
        end: max(n for n in range(min(end, sizes.MOST_MATCH) + 1) if n == 0 or tokens[end - n : end] == tokens[-n:])
        for end in ends
    }
    best = max(longest.values(), default=0)
    size, place = draft.longest_match.py_func(np.array(tokens), len(tokens))
    assert size == best
    if best:
        assert place == max(end for end, its in longest.items() if its == best)


def test_a_text_that_repeats_is_drafted_as_it_goes_on() -> None:
    """Also beyond its own end, but only while the chance is above the threshold."""
    chances, guesses = np.ones(sizes.KINDS, np.float32), np.zeros(sizes.GUESS, np.int64)
    tokens, none = np.array([1, 2, 3, 1, 2, 3, 1, 0, 0, 0, 0, 0]), np.zeros(0, np.int64)
    py = {name: getattr(draft, name).py_func for name in ("draft",)}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("longest_match", "guess"):
            patch.setattr(draft, name, getattr(draft, name).py_func)
        py["draft"](tokens, 7, 5, 0, np.float32(0.5), none, chances, guesses)
        assert tokens.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]
        assert guesses[:2].tolist() == [5, 2]
        py["draft"](tokens, 7, 5, 0, np.float32(0.5), none, 0.75 * chances, guesses)
        assert guesses[0] == 2  # 0.75, 0.56, and no more
        py["draft"](tokens, 7, 5, 10, np.float32(0.5), none, chances, guesses)
        assert guesses[:2].tolist() == [3, -1]  # known tokens are not guessed
