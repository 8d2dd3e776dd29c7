"""Sample a corpus of stories from the teacher: one JSON string per line.

python -m tools.train_stories.sample --teacher teacher.safetensors --out corpus.jsonl --characters 400e6
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tools.train_stories.checkpoint import BOS
from tools.train_stories.openings import opening
from tools.train_stories.teacher import Teacher

SHORTEST, LONGEST = 150, 2000  # characters
PROGRESS_SECONDS = 5.0
PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})
KNOWN = re.compile(r"[\t\r\n -~]+")  # what is left beside ASCII text is the teacher stumbling


def clean(text: str) -> str | None:
    """A story with plain quotes, dashes and white space, or None when it is none worth learning from."""
    text = text.translate(PLAIN)
    if not KNOWN.fullmatch(text):
        return None
    text = "\n".join(" ".join(line.split()) for line in text.splitlines()).strip()
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text if SHORTEST <= len(text) <= LONGEST else None


def stories(teacher: Teacher, batch: int, temperature: float, floor: float, seed: int) -> Iterator[list[str]]:
    """Endless batches of distinct, finished stories."""
    rng = random.Random(seed)
    seen: set[bytes] = set()

    def start() -> torch.Tensor:
        prompts = [teacher.encode(opening(rng)) for _ in range(batch)]
        return teacher.start(prompts, temperature, rng.getrandbits(63), floor)

    following = start()
    while True:
        started, following = following, start()  # the device samples one batch while this machine reads the last
        kept = []
        for ids in teacher.finish(started):
            story = clean(teacher.decode(ids)) if ids[-1] == BOS else None
            if story is None:
                continue
            digest = hashlib.blake2b(story.encode(), digest_size=8).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append(story)
        yield kept


def write_corpus(batches: Iterator[list[str]], out: Path, wanted: float, batch: int) -> None:
    """Write stories until their characters reach the wanted number."""
    count, characters, sampled = 0, 0, 0
    start = shown = time.monotonic()
    with out.open("w", encoding="ascii") as file:
        for kept in batches:
            file.writelines(json.dumps(story) + "\n" for story in kept)
            count += len(kept)
            characters += sum(map(len, kept))
            sampled += batch
            now, done = time.monotonic(), characters >= wanted
            if done or now - shown > PROGRESS_SECONDS:
                shown = now
                rate, share = characters / (now - start), count / sampled
                print(f"{count:,} stories, {characters:,} characters, {rate:,.0f} characters/s, {share:.1%} kept")
                sys.stdout.flush()
            if done:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="packed checkpoint")
    parser.add_argument("--out", type=Path, help="file to write; needed unless --preview is given")
    parser.add_argument("--characters", type=float, default=400e6, help="characters wanted")
    parser.add_argument("--temperature", type=float, default=0.95)
    parser.add_argument("--floor", type=float, default=0.0, help="drop tokens this much less likely than the likeliest")
    parser.add_argument("--batch", type=int, default=4096, help="stories sampled at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preview", type=int, default=0, metavar="N", help="print N stories and write nothing")
    options = parser.parse_args()
    if not options.preview and options.out is None:
        parser.error("--out is needed unless --preview is given")

    dtype = torch.float32 if options.device == "cpu" else torch.float16
    teacher = Teacher.load(options.teacher, options.device, dtype)
    batch: int = options.preview or options.batch
    batches = stories(teacher, batch, options.temperature, options.floor, options.seed)
    if options.preview:
        shown = 0
        while shown < options.preview:
            for story in next(batches)[: options.preview - shown]:
                print(story, end="\n\n---\n\n")
                shown += 1
    else:
        write_corpus(batches, options.out, options.characters, batch)


if __name__ == "__main__":
    main()
