"""Turn the corpus into token ids: a flat array of stories, each closed by <|endoftext|>, and a held-out part as text.

python -m tools.train_stories.encode --corpus corpus.jsonl --out data
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

from warpline.model.tokenizer import END_OF_TEXT, Tokenizer

HELD_OUT = 100  # one story in so many is kept from training
CHUNK = 20_000  # stories encoded at once


def encode(corpus: Path, out: Path) -> None:
    """Write tokens.npy (uint16), starts.npy (where each story begins) and held_out.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.gpt2()
    (end,) = tokenizer.encode(END_OF_TEXT, special=True)
    pieces: list[np.ndarray] = []
    lengths: list[int] = []
    characters = held_out = 0
    with corpus.open(encoding="utf-8") as file, (out / "held_out.jsonl").open("w", encoding="utf-8") as kept:
        numbered = enumerate(file)
        while chunk := list(itertools.islice(numbered, CHUNK)):
            kept.writelines(line for number, line in chunk if number % HELD_OUT == 0)
            held_out += sum(number % HELD_OUT == 0 for number, _ in chunk)
            stories = [json.loads(line) for number, line in chunk if number % HELD_OUT]
            characters += sum(map(len, stories))
            ids = [[*story, end] for story in tokenizer.encode_many(stories)]
            lengths += map(len, ids)
            pieces.append(np.fromiter(itertools.chain.from_iterable(ids), np.uint16))
            print(f"\r{len(lengths):,} stories encoded", end="", flush=True)
    tokens = np.concatenate(pieces)
    np.save(out / "tokens.npy", tokens)
    np.save(out / "starts.npy", np.cumsum([0, *lengths[:-1]]))
    per_token = characters / (len(tokens) - len(lengths))
    print(
        f"\r{len(lengths):,} stories, {characters:,} characters, {len(tokens):,} tokens "
        f"({per_token:.2f} characters each); {held_out:,} stories held out"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    encode(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
