"""The memory between the stages of a call of the cpu executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpline.config import ModelConfig
from warpline.engine.slots import Slots
from warpline.kernels.cpu.sizes import LINE, ROOM, SUMS, apart, attending, row_bytes
from warpline.kernels.cpu.words import Word

#: Rows up to which each thread prepares x for itself, rather than wait for others.
ALONE = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory between stages: a row for each token that is run at once. What is never written costs nothing, so
    there is room for every slot with all of its drafts."""

    x: Tensor
    qkv: Tensor
    attended: Tensor
    hidden: Tensor
    logits: Tensor  # of rows that a token follows
    noisy: Tensor  # the same with noise
    raw: Tensor  # the same unchanged, for log-probabilities
    marks: Tensor
    prepared: Tensor  # rows of x as products take them
    private: Tensor  # of each thread: a few such rows and scratch, for a product or for attention

    @classmethod
    def of(cls, config: ModelConfig, slots: Slots, *, rows: int, chosen: int, threads: int) -> Memory:
        """Allocate it for `rows` tokens at once, `chosen` of which have logits."""
        width, inner, vocab = config.n_embd, config.inner, config.vocab_size
        inputs = max(width, inner)
        of_row = max(row_bytes(inputs), 4 * apart(inputs))
        products = (ALONE + 1) * of_row + 4 * (ROOM * inputs + SUMS) + LINE
        each = max(products, 4 * attending(width // config.n_head, slots.capacity))
        # Rows that products read directly are padded, so that they do not compete for the same cache sets.
        x, qkv, attended, hidden = (torch.empty(rows, size) for size in (width, 3 * width, apart(width), apart(inner)))
        logits, noisy, raw = (torch.empty(chosen, vocab) for _ in range(3))
        return cls(
            x, qkv, attended, hidden, logits, noisy, raw,
            marks=torch.from_numpy(np.zeros((chosen, vocab), np.uint8)),
            prepared=torch.empty(rows * of_row, dtype=torch.uint8),
            private=torch.empty(threads, -(-each // LINE) * LINE // 4),
        )  # fmt: skip

    def words(self) -> dict[Word, Any]:
        """Return what a call is told of it besides the stages' sources and targets."""
        return {
            Word.X: self.x,
            Word.LOGITS: self.logits,
            Word.NOISY: self.noisy,
            Word.MARKS: self.marks,
            Word.RAW: self.raw,
            Word.PREPARED: self.prepared,
            Word.PRIVATE: self.private,
            Word.PRIVATE_SIZE: self.private.shape[1],
        }
