"""How well a model predicts given texts; the measure used for every executor and precision."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """Negative log-likelihood of texts, each with its end of text."""

    nats: float
    tokens: int
    characters: int

    @property
    def nats_per_token(self) -> float:
        """Nats per token; comparable between precisions of one model."""
        return self.nats / self.tokens

    @property
    def nats_per_character(self) -> float:
        """Nats per character; comparable between models with different tokenizers."""
        return self.nats / self.characters

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(self.nats_per_token)
