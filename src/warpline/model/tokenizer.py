"""Converts text to ids and back: GPT-2's byte-level BPE from the bundled merges, or a folder's tokenizer.json."""

from __future__ import annotations

import codecs
import functools
import gzip
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from warpline.errors import ConfigError, ModelError

END_OF_TEXT = "<|endoftext|>"
#: Files of other kinds of tokenizers in model folders.
FOREIGN = ("vocab.txt", "*.model", "vocab.json", "merges.txt")
#: Every file that can be part of a tokenizer.
FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", *FOREIGN)


@functools.cache
def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's printable character for every byte, in the order of the ids 0 … 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def _bundled() -> Backend:
    packed = resources.files("warpline.model").joinpath("data/vocab.bpe.gz").read_bytes()
    lines = gzip.decompress(packed).decode("utf-8").splitlines()
    merges = [(left, right) for left, right in (line.split(" ") for line in lines[1:] if line)]
    tokens = [*byte_alphabet().values(), *(left + right for left, right in merges)]
    return _byte_level(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))


def _byte_level(model: models.BPE) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


class _Joiner:
    """Joins the bytes of tokens for many texts at once with numpy, from one array with the bytes of all tokens."""

    def __init__(self, table: Sequence[bytes]):
        self._bytes = np.frombuffer(b"".join(table), np.uint8)
        self._lengths = np.array([*map(len, table), 0])  # the last is for ids that the tokenizer does not know
        self._begins = self._lengths.cumsum() - self._lengths

    def join(self, texts: Sequence[np.ndarray]) -> list[bytes]:
        """Return the bytes of each text, given as ids."""
        ids = np.concatenate(texts)
        ids = np.where((ids >= 0) & (ids < len(self._lengths)), ids, len(self._lengths) - 1)
        lengths = self._lengths[ids]
        ends = lengths.cumsum()
        places = np.arange(ends[-1] if len(ends) else 0) + (self._begins[ids] - ends + lengths).repeat(lengths)
        joined = self._bytes[places].tobytes()
        counts = np.array([len(text) for text in texts], np.int64)
        borders = [0, *np.concatenate(([0], ends))[counts.cumsum()].tolist()]
        return [joined[begin:end] for begin, end in itertools.pairwise(borders)]


class Tokenizer:
    """Encodes and decodes. Special tokens such as <|endoftext|> are plain text unless `special` is asked for."""

    def __init__(self, backend: Backend):
        backend.encode_special_tokens = True  # treat them as text; `encode` splits at them if asked to
        backend.no_truncation()  # some files contain settings of a training run
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._split = re.compile("(" + "|".join(map(re.escape, self._special)) + ")") if self._special else None
        self._special_ids = frozenset(self._special.values())
        self._size = backend.get_vocab_size()
        self._bytes = self._byte_table(set(added)) if isinstance(backend.decoder, decoders.ByteLevel) else None
        #: The same table, empty for special tokens, which are left out.
        self._plain_bytes = (
            None if self._bytes is None else [b"" if i in self._special_ids else b for i, b in enumerate(self._bytes)]
        )

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """Return OpenAI's GPT-2 tokenizer."""
        return cls(_bundled())

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json."""
        try:
            return cls(Backend.from_file(str(path)))
        except Exception as error:  # the backend raises nothing narrower
            raise ModelError(f"cannot read {path}: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Return a model folder's own tokenizer, or GPT-2's if the folder has none."""
        if (folder / "tokenizer.json").exists():
            return cls.from_file(folder / "tokenizer.json")
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        if vocab.exists() and merges.exists():
            try:
                return cls(_byte_level(models.BPE.from_file(str(vocab), str(merges))))
            except Exception as error:  # the backend raises nothing narrower
                raise ModelError(f"cannot read {vocab} and {merges.name}: {error}") from error
        foreign = [path.name for name in FOREIGN for path in sorted(folder.glob(name))]
        if foreign:
            raise ModelError(
                f"{folder} has a tokenizer that Warpline cannot read ({', '.join(foreign)}): save it as tokenizer.json"
            )
        return cls.gpt2()

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`; with `special`, <|endoftext|> in it becomes that token."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text holds a lone surrogate at character {error.start}: it is not Unicode"
            ) from None
        if not special or self._split is None:
            return self._encode(text)
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self._special[part]] if part in self._special else self._encode(part)
        return ids

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the backend raises nothing narrower
            raise ModelError(f"the model's tokenizer cannot encode the text: {error}") from error
        return ids

    def encode_many(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Encode many texts at once, on all cores."""
        if special and self._split is not None and any(map(self._split.search, texts)):
            return [self.encode(text, special=True) for text in texts]
        try:
            return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]
        except Exception:  # noqa: BLE001 - the backend raises nothing narrower; `encode` says what is wrong
            return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`; special tokens are left out unless `special`. Broken UTF-8 becomes U+FFFD."""
        ids = ids if isinstance(ids, list | tuple) else list(ids)
        joined = self.joined_bytes(ids, special=special)
        if joined is not None:
            return joined.decode("utf-8", errors="replace")
        stream = self.stream(special=special)
        return stream.extend(ids) + stream.flush()

    def joined_bytes(self, ids: Iterable[int], *, special: bool = False) -> bytes | None:
        """Return the joined bytes of tokens, or None if this tokenizer does not work on bytes. Ids that the tokenizer
        does not know, which a padded vocabulary may have, are left out."""
        table = self._bytes if special else self._plain_bytes
        if table is None:
            return None
        known = ids if isinstance(ids, list | tuple) else list(ids)
        try:
            if known and min(known) < 0:
                raise IndexError
            return b"".join(map(table.__getitem__, known))
        except IndexError:
            return b"".join([table[i] for i in known if 0 <= i < len(table)])

    @property
    def on_bytes(self) -> bool:
        """Whether a text is the joined bytes of its tokens."""
        return self._bytes is not None

    def join_many(self, texts: Sequence[np.ndarray]) -> list[bytes]:
        """Return the bytes of texts without special tokens, in a third of the time of one call per text."""
        return self._joiner.join(texts)

    @functools.cached_property
    def _joiner(self) -> _Joiner:
        if self._plain_bytes is None:
            raise ModelError("this tokenizer does not work on bytes")
        return _Joiner(self._plain_bytes)

    def stream(self, *, special: bool = False) -> StreamDecoder:
        """Return a decoder that takes ids one by one."""
        return StreamDecoder(self, special)

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token, or None if this tokenizer does not work on bytes."""
        return None if self._bytes is None else self._bytes[token]

    def piece(self, token: int) -> str:
        """Return the token's name in the vocabulary, which some engines take instead of its id."""
        return str(self._backend.id_to_token(token))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and, for a BPE, vocab.json and merges.txt for older readers."""
        self._backend.save(str(folder / "tokenizer.json"))
        if isinstance(self._backend.model, models.BPE):
            self._backend.model.save(str(folder))
            vocab = sorted(self._backend.get_vocab().items(), key=lambda entry: entry[1])
            (folder / "vocab.json").write_text(json.dumps(dict(vocab), ensure_ascii=False), encoding="utf-8")

    def _byte_table(self, added: set[int]) -> list[bytes]:
        byte = {char: value for value, char in byte_alphabet().items()}
        table: list[bytes] = []
        for i in range(len(self)):
            token = self._backend.id_to_token(i)
            if token is None or i in added or not all(char in byte for char in token):
                table.append((token or "").encode("utf-8"))  # these stand for their own text
            else:
                table.append(bytes(byte[char] for char in token))
        return table

    def _plain_decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _skips(self, token: int, special: bool) -> bool:
        return (token in self._special_ids and not special) or not 0 <= token < len(self)


class StreamDecoder:
    """Turns ids into text as they come and never emits half a character.

    All pieces and the result of `flush` together are the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool):
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending: list[int] = []  # ids whose text may still change, for tokenizers that do not work on bytes
        self._emitted = ""

    def push(self, token: int) -> str:
        """Return the text that became certain with `token`; it may be empty."""
        if self._tokenizer._skips(token, self._special):
            return ""
        piece = self._tokenizer.token_bytes(token)
        if piece is not None:
            return self._utf8.decode(piece)
        self._pending.append(token)
        text = self._tokenizer._plain_decode(self._pending)
        return "" if text.endswith("\ufffd") else self._emit(text)

    def extend(self, tokens: Iterable[int]) -> str:
        """Push several tokens and return their text."""
        tokens = list(tokens)
        piece = self._tokenizer.joined_bytes(tokens, special=self._special)
        return "".join(map(self.push, tokens)) if piece is None else self._utf8.decode(piece)

    def flush(self) -> str:
        """Return what is left when no more ids come; an unfinished character becomes U+FFFD."""
        rest = self._utf8.decode(b"", final=True)
        return rest + (self._emit(self._tokenizer._plain_decode(self._pending)) if self._pending else "")

    def _emit(self, text: str) -> str:
        # The last id stays as context: the token before can decide whether a space precedes a token.
        piece = text[len(self._emitted) :]
        self._pending = self._pending[-1:]
        self._emitted = self._tokenizer._plain_decode(self._pending)
        return piece
