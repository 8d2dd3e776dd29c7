"""How well a model predicts given texts: the measure that guards every precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from warpline.model.gpt2 import GPT2
from warpline.model.tokenizer import END_OF_TEXT, Tokenizer


@dataclass(frozen=True, slots=True)
class Score:
    """Negative log-likelihood of texts, each with its end."""

    nats: float
    tokens: int
    characters: int

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def nats_per_character(self) -> float:
        """Comparable between models with different tokenizers."""
        return self.nats / self.characters


@torch.no_grad()
def score(model: GPT2, tokenizer: Tokenizer, texts: list[str], rows: int = 16) -> Score:
    """Score every token of `texts` and the <|endoftext|> behind each, as seen from one <|endoftext|> before it."""
    device = model.wte.weight.device
    (end,) = tokenizer.encode(END_OF_TEXT, special=True)
    nats, count = 0.0, 0
    for first in range(0, len(texts), rows):
        chunk = [[end, *ids, end] for ids in tokenizer.encode_many(texts[first : first + rows])]
        length = max(map(len, chunk)) - 1
        fed = torch.tensor([ids[:-1] + [end] * (length + 1 - len(ids)) for ids in chunk], device=device)
        wanted = torch.tensor([ids[1:] + [-100] * (length + 1 - len(ids)) for ids in chunk], device=device)
        loss = F.cross_entropy(model(fed).flatten(0, 1).float(), wanted.flatten(), ignore_index=-100, reduction="sum")
        nats += float(loss)
        count += int((wanted >= 0).sum())
    return Score(nats, count, sum(map(len, texts)))
