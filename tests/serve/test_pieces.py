"""However a sequence is split into chunks, its pieces are its text: no half characters, no part of a stop text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.live import TOKENIZER
from warpline.engine.text import Text
from warpline.serve.pieces import Itemised, Maker, Piece, Plain, Stopped, Table

TABLE = Table(TOKENIZER, 50300)  # a padded vocabulary
TEXTS = st.text(st.sampled_from('ab \n"\\é☃🐸\u2028\x00'), max_size=30)
#: Tokens of text, and any others: halves of characters, the end of text, ids beyond the tokenizer's.
TOKENS = st.one_of(TEXTS.map(TOKENIZER.encode), st.lists(st.integers(0, 50299), max_size=20))
CUTS = st.lists(st.integers(0, 30), max_size=8)


def chunks(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    places = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(places)]


def read(piece: Piece) -> str:
    text = json.loads(b'"' + piece.text + b'"')
    assert isinstance(text, str)
    return text


def pieces(maker: Maker, parts: list[list[int]]) -> list[Piece]:
    found = [piece for part in parts for piece in maker.take(part, ended=False)]
    return found + maker.take([], ended=True)


class OfWords:
    """A tokenizer that does not work on bytes."""

    def joined_bytes(self, _ids: list[int], *, special: bool = False) -> None:
        return None


def test_a_table_knows_its_longest_token() -> None:
    """By which a text is refused as too long before it is encoded."""
    assert TABLE.longest == max(len(TOKENIZER.joined_bytes([token]) or b"") for token in range(50257)) > 64
    table = Table(OfWords(), 5)  # type: ignore[arg-type]
    assert (table.longest, table.escaped, table.on_bytes) == (64, [None] * 5, False)


@given(TOKENS, CUTS)
def test_plain(tokens: list[int], cuts: list[int]) -> None:
    found = pieces(Plain(TABLE), chunks(tokens, cuts))
    assert "".join(map(read, found)) == TOKENIZER.decode(tokens)


@given(TOKENS, CUTS, st.sampled_from([None, 1, 2, 5]))
def test_itemised(tokens: list[int], cuts: list[int], interval: int | None) -> None:
    found = pieces(Itemised(TOKENIZER, None, interval), chunks(tokens, cuts))
    assert "".join(map(read, found)) == TOKENIZER.decode(tokens)
    places = [(piece.first, piece.last) for piece in found if piece.first != piece.last]
    assert [at for first, last in places for at in range(first, last)] == list(range(len(tokens)))
    if interval is not None:
        sizes = [last - first for first, last in places]
        assert sizes[:1] in ([], [1])
        assert all(size == interval for size in sizes[1:-1])
        assert all(size <= interval for size in sizes)


@given(TEXTS, CUTS, st.lists(st.text(st.sampled_from("ab \né"), min_size=1, max_size=4), min_size=1, max_size=3),
       st.sampled_from(["text", "items", "one"]))  # fmt: skip
def test_stop_texts(text: str, cuts: list[int], stops: list[str], how: str) -> None:
    tokens = TOKENIZER.encode(text)
    watched = Text(TOKENIZER, stops, 0)
    maker: Maker = Stopped(watched) if how == "text" else Itemised(TOKENIZER, watched, 1 if how == "one" else None)
    found: list[Piece] = []
    seen = 0
    for part in chunks(tokens, cuts):
        cut = watched.extend(part)
        found += maker.take(part if cut is None else part[: cut - seen], ended=cut is not None)
        if cut is not None:
            break
        seen += len(part)
        said = "".join(map(read, found))
        assert not any(stop in said for stop in stops)
    else:
        found += maker.take([], ended=True)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    # Which stop text comes first may depend on the token that completes it; what was sent is a clear beginning.
    said = "".join(map(read, found))
    assert text.startswith(said)
    assert not any(stop in said for stop in stops)
    if not places:
        assert said == text
    shown = [at for piece in found for at in range(piece.first, piece.last)]
    if how != "text":
        assert shown == list(range(len(shown)))


def test_a_maker_never_says_half_a_character() -> None:
    frog = TOKENIZER.encode("🐸")
    assert len(frog) > 1
    maker = Plain(TABLE)
    assert read(maker.take(frog[:1], ended=False)[0]) == ""
    assert read(maker.take(frog[1:], ended=False)[0]) == "🐸"
    assert read(maker.take(frog[:1], ended=False)[0]) == ""
    assert read(maker.take([], ended=True)[0]) == "\ufffd"


@pytest.mark.parametrize("token", [0, 50256, 220, 50299])
def test_names(token: int) -> None:
    assert isinstance(TABLE.name(token), str)
    assert TABLE.name(TOKENIZER.encode("🐸")[0]).startswith("bytes:\\x")
