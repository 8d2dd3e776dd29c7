"""Quality of a smaller dtype: two engines read the same text token by token, and their predictions are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from warpline.config import SamplingParams
from warpline.engine.llm import LLM
from warpline.engine.request import Request
from warpline.engine.slots import Slots
from warpline.errors import ConfigError
from warpline.model.tokenizer import END_OF_TEXT


@dataclass(slots=True)
class Quality:
    """How well one dtype predicts a text, compared with the first one."""

    dtype: str  # and the dtype of the KV cache, if it differs
    tokens: int = 0
    characters: int = 0
    nats: float = 0.0
    agreeing: int = 0  # tokens where the likeliest one agrees with the first's
    divergence: float = 0.0  # Kullback-Leibler divergence from the first's prediction, in nats
    furthest: float = 0.0  # largest error of a logit, relative to the spread of its row

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(self.nats / self.tokens)

    def as_dict(self) -> dict[str, float | int | str]:
        """Return a dictionary for tables and JSON."""
        return {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "perplexity": self.perplexity,
            "bits_per_character": self.nats / math.log(2) / self.characters,
            "top1_agreement": self.agreeing / self.tokens,
            "kl_nats": self.divergence / self.tokens,
            "worst_logit": self.furthest,
        }


def pieces(llm: LLM, text: str, length: int) -> list[tuple[list[int], int]]:
    """Split a text into pieces of up to `length` tokens; return each with its number of characters."""
    ids = llm.tokenizer.encode(text)
    cut = [ids[i : i + length] for i in range(0, len(ids), length)]
    return [(piece, len(llm.tokenizer.decode(piece))) for piece in cut]


def evaluate(
    engines: Sequence[LLM], texts: Sequence[str], *, length: int = 256, tick: Callable[[int], None] = lambda _: None
) -> list[Quality]:
    """Let every engine read the same tokens through its own decode steps, and compare it with the first."""
    first = engines[0]
    length = min(length, first.config.n_positions - 2)
    if length < 1:
        raise ConfigError(f"{first.model} has a context of {first.config.n_positions}: too short to predict anything")
    found = [Quality(llm.dtype + (f", {llm.kv_dtype} KV" if llm.kv_dtype else "")) for llm in engines]
    (start,) = first.tokenizer.encode(END_OF_TEXT, special=True)
    for text in texts:
        for ids, characters in pieces(first, text, length):
            begun = [_begin(llm, start, ids) for llm in engines]
            for quality in found:
                quality.characters += characters
            for token in ids:
                rows = [
                    llm.executor.observe(slots, lanes)["logits"][0].double()
                    for llm, (slots, lanes) in zip(engines, begun, strict=True)
                ]
                _compare(found, rows, token)
                tick(1)
    if not found[0].tokens:
        raise ConfigError("there is no text to evaluate: give one that is not empty")
    return found


def _begin(llm: LLM, start: int, ids: Sequence[int]) -> tuple[Slots, list[int]]:
    """Return a slot with the tokens after <|endoftext|>. Its cache is empty: a step at position 0 needs no prompt."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    slots = llm.executor.allocate(1, len(ids) + 2)
    return slots, slots.admit([Request([start], params, 0, 0, len(ids) + 2, forced=list(ids))])


def _compare(found: Sequence[Quality], rows: Sequence[torch.Tensor], token: int) -> None:
    expected = rows[0].log_softmax(dim=-1)
    spread = float(rows[0].std())
    for quality, row in zip(found, rows, strict=True):
        prediction = row.log_softmax(dim=-1)
        quality.tokens += 1
        quality.nats -= float(prediction[token])
        quality.agreeing += int(row.argmax() == rows[0].argmax())
        quality.divergence += float((expected.exp() * (expected - prediction)).sum())
        quality.furthest = max(quality.furthest, float((row - rows[0]).abs().max()) / spread)
