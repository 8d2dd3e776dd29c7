"""Text while it grows: chunks of any size give the same as single tokens, and never a stop text."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpline.config import ModelConfig, SamplingParams
from warpline.engine.prefix import LEAST_PREFIX, share_prefixes
from warpline.engine.request import Request
from warpline.engine.scheduler import Sequence
from warpline.engine.text import Text, Timings
from warpline.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer.gpt2()


@settings(max_examples=200)
@given(data=st.data())
def test_chunks_do_not_matter(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 10_000)))
    ids = [rng.choice([11, 13, 198, 262, 290, 383, 34754, 220, 94, 225, 50256, 447, 247]) for _ in range(40)]
    whole = TOKENIZER.decode(ids)
    at = rng.randrange(len(whole))
    stops = data.draw(st.sampled_from([(), (whole[at : at + 2],), ("zz", whole[at : at + 5], whole[-1:])]))
    least = data.draw(st.integers(0, 12))

    def run(sizes: list[int]) -> tuple[str, int | None, str]:
        text, left, seen = Text(TOKENIZER, stops, least), list(ids), ""
        for size in sizes:
            chunk, left = left[:size], left[size:]
            if chunk and (cut := text.extend(chunk)) is not None:
                return text.text, cut, seen + text.release(ended=True)
            seen += text.release(ended=False)
        text.finish()
        return text.text, None, seen + text.release(ended=True)

    one_by_one = run([1] * 40)
    assert run(data.draw(st.lists(st.integers(1, 15), min_size=40, max_size=40))) == one_by_one
    assert one_by_one[0] == one_by_one[2]  # what was passed on piece by piece
    if not stops:
        assert one_by_one[0] == whole


def test_a_reader_never_sees_a_stop_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while it is cut out."""
    text = Text(TOKENIZER, ("frog",), 0)
    text.extend(TOKENIZER.encode("A little "))
    cut, seen = Text._cut, []

    def watched(self: Text) -> int:
        seen.append(self.release(ended=False))
        return cut(self)

    monkeypatch.setattr(Text, "_cut", watched)
    assert text.extend(TOKENIZER.encode("green frog jumps")) is not None
    assert seen == ["A little "]
    assert text.text == "A little green "


def sequences(prompts: list[list[int]]) -> list[Sequence]:
    return [Sequence(Request(np.array(prompt), SamplingParams(), 0, i, 500)) for i, prompt in enumerate(prompts)]


def test_which_prompts_share() -> None:
    system = list(range(LEAST_PREFIX + 6))
    tails = [[*system, 900], [*system, 901, 902], [*system, 903]]
    found = sequences([*tails, [5, 6], [5, 6], [5, 7], system, system[:50], [8], [8]])
    share_prefixes(found)
    (first,), (pair,) = found[0].prefixes, found[3].prefixes
    assert all(found[i].prefixes == [first] for i in (0, 1, 2, 6))
    assert (first.length, first.whole) == (len(system) - 1, False)  # the last token of the shortest prompt is run
    assert found[4].prefixes == [pair]
    assert (pair.length, pair.whole) == (1, True)
    assert [found[i].prefixes for i in (5, 7, 8, 9)] == [[]] * 4


def test_equal_prompts_share_all_and_what_others_have_too() -> None:
    system = list(range(LEAST_PREFIX))
    found = sequences([[*system, *[i] * 100] for i in (1, 1, 1, 2, 2, 2)])
    share_prefixes(found)
    prefixes = [s.prefixes for s in found]
    assert [[(p.length, p.whole) for p in mine] for mine in prefixes] == [[(163, True), (64, False)]] * 6
    assert prefixes[0][0] is prefixes[2][0] is not prefixes[3][0]
    assert prefixes[0][1] is prefixes[5][1]


@pytest.mark.parametrize("stop", ["ab", "The end", "xyx"])
def test_a_stop_text_that_comes_letter_by_letter_is_kept_back(stop: str) -> None:
    """All its letters but the last may be the beginning of a stop text."""
    text = Text(TOKENIZER, (stop,), 0)
    seen = ""
    for letter in f"so {stop[:-1]}":
        (token,) = TOKENIZER.encode(letter)
        assert text.extend([token]) is None
        seen += text.release(ended=False)
    assert seen == "so "
    (last,) = TOKENIZER.encode("!")
    text.extend([last])
    assert seen + text.release(ended=False) == f"so {stop[:-1]}!"


def test_bandwidth_is_bytes_over_seconds() -> None:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=64, n_positions=32, vocab_size=500)
    timings = Timings(config, "fp32", prefill_seconds=1.0, moved=[([3], 4, False)])
    assert timings.gb_per_second is None
    timings.decode_seconds = 0.5
    weights = 4 * (500 * 64 + 32 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64)
    read = weights - 4 * 32 * 64 + 4 * 64  # one row of the positions; the head is the embedding, read once
    assert timings.gb_per_second == pytest.approx(4 * read / 0.5 / 1e9, rel=0.05)
