"""The tokenizer compared with two others: OpenAI's own library and a literal reading of the published rule."""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import json
import sys
import unicodedata
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from warpline.errors import ConfigError, ModelError
from warpline.model.tokenizer import END_OF_TEXT, Tokenizer, byte_alphabet

#: How GPT-2 splits a text into words before merging.
WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

TRICKY = [
    "The capital of France is",
    "I'm you're he'll they've we'd it's don't 'S 'LL ’s",
    "0 12 345 6789 3.14159 1,000,000 ½ ² ٣ Ⅷ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ☃️",
    "e\u0301 a\u030a\u0323 \u1100\u1161\u11a8 n\u0303o",
    " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000 x",
    "a  b   c    d\n\n\ne \n f\t\tg ",
    "\x00\x01\x02\x07\x08\x1b\x7f\x80\x9f",
    "我们在北京吃饺子。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣",
    "שלום עולם Привет мир Γειά σου Κόσμε नमस्ते दुनिया สวัสดี",
    "def f(x):\n    return x**2  # comment\n",
    "https://example.org/?q=a%20b&c=d#e",
    "\ufeffBOM \u200bzero\u200dwidth\u2060 \ufffd \ufffe",
    "<|endoftext|> <|endoftext| > <||>",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 𒀀 🤷🏻‍♂️",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    " ",
    "\n",
    "'",
    "",
]


@functools.cache
def ours() -> Tokenizer:
    return Tokenizer.gpt2()


@functools.cache
def merges() -> list[tuple[str, str]]:
    packed = resources.files("warpline.model").joinpath("data/vocab.bpe.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()[1:]
    return [(left, right) for left, right in (line.split() for line in lines)]


@functools.cache
def openai() -> tiktoken.Encoding:
    byte = {char: value for value, char in byte_alphabet().items()}
    tokens = [*byte_alphabet().values(), *(left + right for left, right in merges())]
    ranks = {bytes(byte[char] for char in token): i for i, token in enumerate(tokens)}
    return tiktoken.Encoding("gpt2", pat_str=WORDS.pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256})


@functools.cache
def merge_rank() -> dict[tuple[str, str], int]:
    return {pair: i for i, pair in enumerate(merges())}


def by_the_rule(text: str) -> list[int]:
    """Split into words, then repeatedly join the pair that was merged first in training."""
    alphabet, rank = byte_alphabet(), merge_rank()
    index = {char: i for i, char in enumerate(alphabet.values())}
    ids: list[int] = []
    for word in WORDS.findall(text):
        parts = [alphabet[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: rank.get(pair, sys.maxsize))
            if best not in rank:
                break
            joined: list[str] = []
            while parts:
                if tuple(parts[:2]) == best:
                    joined.append(parts[0] + parts[1])
                    parts = parts[2:]
                else:
                    joined.append(parts.pop(0))
            parts = joined
        for part in parts:
            ids.append(index[part] if len(part) == 1 else token_index()[part])
    return ids


@functools.cache
def token_index() -> dict[str, int]:
    return {left + right: 256 + i for i, (left, right) in enumerate(merges())}


def test_merges_are_openais() -> None:
    packed = resources.files("warpline.model").joinpath("data/vocab.bpe.gz").read_bytes()
    digest = hashlib.sha256(gzip.decompress(packed)).hexdigest()
    assert digest == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    assert len(ours()) == 50257
    assert ours().encode("The capital of France is") == [464, 3139, 286, 4881, 318]


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_texts(text: str) -> None:
    ids = ours().encode(text)
    assert ids == openai().encode_ordinary(text)
    assert ids == by_the_rule(text)
    assert ours().decode(ids) == text


#: Engines differ in the Unicode version of their letters; what Unicode 14 assigned is common to all.
COMMON = unicodedata if unicodedata.unidata_version <= "14.0.0" else unicodedata.ucd_3_2_0
ASSIGNED = st.characters(exclude_categories=["Cs"]).filter(lambda char: COMMON.category(char) != "Cn")


@settings(max_examples=400)
@given(st.text(ASSIGNED, max_size=60))
def test_any_text(text: str) -> None:
    ids = ours().encode(text)
    assert ids == openai().encode_ordinary(text)
    assert ids == by_the_rule(text)


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_unicode_text_round_trips(text: str) -> None:
    assert ours().decode(ours().encode(text)) == text


def test_every_old_character_is_cut_alike() -> None:
    """Exhaustive: each assigned character among letters and digits and after a space."""
    cut = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if COMMON.category(char) in ("Cs", "Cn"):
            continue
        text = f"a{char}b {char} 1"
        assert [text[i:j] for _, (i, j) in cut.pre_tokenize_str(text)] == WORDS.findall(text), hex(code)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 50256), max_size=40), st.booleans())
def test_stream_equals_decode(ids: list[int], special: bool) -> None:
    stream = ours().stream(special=special)
    pieces = [*(stream.push(i) for i in ids), stream.flush()]
    assert "".join(pieces) == ours().decode(ids, special=special)
    expected = openai().decode_bytes([i for i in ids if special or i != 50256]).decode("utf-8", errors="replace")
    assert "".join(pieces) == expected


def test_stream_never_emits_half_a_character() -> None:
    text = "a👩‍👧é日"
    stream = ours().stream()
    pieces = [stream.push(i) for i in ours().encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""
    cut = ours().stream()
    assert [cut.push(i) for i in ours().encode("日")[:1]] == [""]
    assert cut.flush() == "\ufffd"


def test_special_tokens() -> None:
    tokenizer = ours()
    assert tokenizer.encode(END_OF_TEXT) == openai().encode_ordinary(END_OF_TEXT)
    assert tokenizer.encode(f"a{END_OF_TEXT}b", special=True) == [64, 50256, 65]
    assert tokenizer.encode(END_OF_TEXT * 2, special=True) == [50256, 50256]
    assert tokenizer.decode([64, 50256, 65]) == "ab"
    assert tokenizer.decode([64, 50256, 65], special=True) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([64, 60000]) == "a"  # a padded vocabulary has ids without text


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(ConfigError, match="character 1"):
        ours().encode("a\ud800")


def test_tokenizer_json_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    ours()._backend.save(str(path))
    loaded = Tokenizer.from_file(path)
    for text in TRICKY:
        assert loaded.encode(text) == ours().encode(text)
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_settings_of_a_training_run_are_ignored(tmp_path: Path) -> None:
    """Truncation and padding stored in a file must not touch a prompt."""
    backend = Tokenizer.gpt2()._backend
    text = "one two three four five six seven eight"
    for name in ("truncation", "padding"):
        backend.no_padding()
        if name == "truncation":
            backend.enable_truncation(max_length=4)
        else:
            backend.no_truncation()
            backend.enable_padding(length=30)
        backend.save(str(tmp_path / "tokenizer.json"))
        assert Tokenizer.from_folder(tmp_path).encode(text) == ours().encode(text)


def test_folders_with_other_tokenizer_files(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path).encode("Hi") == ours().encode("Hi")  # without any file: GPT-2's
    ours().save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()  # vocab.json and merges.txt are left
    for text in TRICKY:
        assert Tokenizer.from_folder(tmp_path).encode(text, special=True) == ours().encode(text, special=True)
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(ModelError, match=r"cannot read .*vocab\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]")
    with pytest.raises(ModelError, match=r"vocab\.txt, merges\.txt"):
        Tokenizer.from_folder(tmp_path)


def test_tokens_outside_the_byte_alphabet(tmp_path: Path) -> None:
    vocab = {**{char: i for i, char in enumerate(byte_alphabet().values())}, "日": 256}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    assert Tokenizer(backend).decode([0, 256]) == "!日"


def test_text_a_tokenizer_cannot_encode(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="cannot encode"):
        Tokenizer(backend).encode("b")


def test_tokenizer_that_does_not_work_on_bytes(tmp_path: Path) -> None:
    """A WordPiece model, as some GPT-2s for other languages have; it streams too."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "hello", "world", "##ly", "!"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("hello worldly world hello!")
    stream = tokenizer.stream()
    assert "".join([*(stream.push(i) for i in ids), stream.flush()]) == "hello worldly world hello!"


@given(st.lists(st.lists(st.integers(-1, 50300), max_size=9), min_size=1, max_size=9))
def test_many_texts_have_the_bytes_that_each_has(texts: list[list[int]]) -> None:
    """Including broken characters, special tokens and ids that the tokenizer does not know."""
    tokenizer = _gpt2()
    found = tokenizer.join_many([np.array(ids, np.int64) for ids in texts])
    assert found == [tokenizer.joined_bytes(ids) for ids in texts]


_gpt2 = functools.cache(Tokenizer.gpt2)


def test_many_texts_get_nothing_added_either(tmp_path: Path) -> None:
    """Some tokenizers put a token around each text by default."""
    Tokenizer.gpt2().save(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    around = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [50256], "tokens": ["<|endoftext|>"]}}
    raw["post_processor"] = {
        "type": "TemplateProcessing", "single": around, "pair": around, "special_tokens": special,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    found = Tokenizer.from_folder(tmp_path)
    assert found is not None
    texts = ["Once upon a time", "a frog"]
    expected = [Tokenizer.gpt2().encode(text) for text in texts]
    assert found.encode_many(texts) == [found.encode(text) for text in texts] == expected
