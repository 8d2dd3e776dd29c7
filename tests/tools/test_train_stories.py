"""The training pipeline, end to end on a corpus small enough for a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.train_stories.encode import encode
from tools.train_stories.openings import TEMPLATES, WORDS, opening
from tools.train_stories.train import learning_rate, train, windows
from warpline import LLM, SamplingParams
from warpline.config import ModelConfig
from warpline.model.tokenizer import Tokenizer

END = 50256


def test_openings_are_filled_in_and_varied() -> None:
    rng = random.Random(0)
    drawn = [opening(rng) for _ in range(2000)]
    assert 0.28 < drawn.count("") / len(drawn) < 0.38
    assert not any("{" in text or " a o" in text or " a e" in text for text in drawn)
    assert len(set(drawn)) > 1000
    assert len(TEMPLATES) > 40
    assert all(len(words) > 4 for words in WORDS.values())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(4, 30))
def test_windows_begin_with_stories_and_miss_nothing(lengths: list[int], size: int) -> None:
    starts = np.cumsum([0, *lengths[:-1]])
    total = sum(lengths)
    cuts = windows(starts, total, size)
    covered: set[int] = set()
    for cut in cuts:
        assert cut + size + 1 <= total
        assert not covered or cut in starts or cut - size in cuts  # of a story, or in a long one
        covered |= set(range(cut, cut + size))
    if len(cuts):
        assert covered == set(range(cuts[-1] + size))


def test_learning_rate_rises_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 1000, 1.0) for step in range(1000)]
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert peak < 30
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-4


def test_pipeline(tmp_path: Path) -> None:
    rng = random.Random(1)
    stories = [f"{opening(rng) or 'Once.'} The end of story {i} came soon, and all were glad." for i in range(600)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(map(json.dumps, stories)) + "\n")
    encode(corpus, tmp_path / "data")
    tokens = np.load(tmp_path / "data" / "tokens.npy")
    starts = np.load(tmp_path / "data" / "starts.npy")
    held_out = [json.loads(line) for line in (tmp_path / "data" / "held_out.jsonl").read_text().splitlines()]
    assert held_out == stories[::100]
    assert len(starts) == len(stories) - len(held_out)
    assert (tokens == END).sum() == len(starts)
    first = tokens[: np.argmax(tokens == END)].tolist()
    assert Tokenizer.gpt2().decode(first) == stories[1]

    config = ModelConfig(n_layer=1, n_head=1, n_embd=64, n_positions=24)
    train(tmp_path / "data", tmp_path / "run", 2, 8, 1e-2, 1, "cpu", config)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.4 * log[0]["loss"]
    assert log[-1]["validation_loss"] < 0.4 * log[0]["validation_loss"]

    llm = LLM(str(tmp_path / "run" / "stories"))
    (completion,) = llm.generate("The end of", SamplingParams(temperature=0, max_tokens=20))
    assert completion.text.startswith(" story")
