"""Everything a running batch needs, on the device, allocated once and used again by the next request.

An executor reads the newest token and its position here and writes the next one here, so nothing is handed over
per token. Row b of `tokens` holds its prompt and then what was generated; `length[b]` says how much of it is valid.
Randomness is a table too: from the 32-bit key `noise[b, t]` follows the noise of every token at position t. It comes
from the row's seed, prompt and sample number alone, so a row draws the same whatever it is batched with, and no
executor keeps a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from warpline.config import ModelConfig, SamplingParams
from warpline.model.gpt2 import KVCache


@dataclass(frozen=True, slots=True)
class Request:
    """One row to be generated."""

    prompt: Rows[int]
    params: SamplingParams
    seed: int
    sample: int  # which of the n completions of the prompt
    limit: int  # length at which the row ends, prompt included
    forced: Rows[int] = ()  # tokens to take instead of drawing, for scoring a given text

    @property
    def stream(self) -> int:
        """Which of a seed's random streams the row uses: prompts and samples that differ draw independently."""
        content = np.array([self.sample, *self.prompt], dtype=np.int64).tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Needs:
    """Which sampling stages the batch uses at all; known on the host, so that unused ones cost nothing."""

    penalty: bool
    min_length: bool
    random: bool
    candidates: int  # how many of the likeliest tokens top-k and top-p may have to look at; 0 if no row uses either
    min_p: bool
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """What the host sees after a chunk: the tokens behind `first` and how far each row is."""

    first: int
    length: np.ndarray
    broken: np.ndarray  # rows whose logits were not finite
    tokens: np.ndarray  # [B, tokens since first]
    logprob: np.ndarray | None  # [B, tokens since first]
    top_logprob: np.ndarray | None  # [B, tokens since first, K]
    top_token: np.ndarray | None


class State:
    """Device buffers for up to `rows` sequences of up to `capacity` positions.

    For every row that is not done, an executor's step takes the token at length - 1, stores its K and V in that slot,
    and then, as `sampling.advance` does in torch: writes the next token at `length` (the one that stands there already
    while length < known), sets `broken` if the logits are not finite, fills the logprob buffers if there are any, adds
    1 to `length`, and sets `done` at the end of text (where stops_at_eos) or at `limit`.
    """

    def __init__(self, config: ModelConfig, rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype):
        self.config, self.rows, self.capacity, self.device = config, rows, capacity, device
        self.cache = KVCache(config, rows, capacity, device=device, dtype=dtype)
        self.tokens = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.noise = torch.zeros(rows, capacity, dtype=torch.int32, device=device)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.known = torch.zeros_like(self.length)
        self.limit = torch.zeros_like(self.length)
        self.min_length = torch.zeros_like(self.length)
        self.top_k = torch.zeros_like(self.length)
        self.temperature = torch.zeros(rows, device=device)
        self.top_p = torch.zeros_like(self.temperature)
        self.min_p = torch.zeros_like(self.temperature)
        self.penalty = torch.zeros_like(self.temperature)
        self.stops_at_eos = torch.zeros(rows, dtype=torch.bool, device=device)
        self.done = torch.zeros_like(self.stops_at_eos)
        self.broken = torch.zeros_like(self.stops_at_eos)
        self.logprob: Tensor | None = None
        self.top_logprob: Tensor | None = None
        self.top_token: Tensor | None = None
        self.batch = 0
        self.longest = 0  # no row is longer; known on the host without asking the device
        self.needs = Needs(False, False, False, 0, False, None)

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether a batch of this size can be begun here."""
        return rows <= self.rows and capacity <= self.capacity

    def begin(self, requests: Rows[Request]) -> None:
        """Take in a new batch; nothing of the last one is left."""
        batch, params = len(requests), [request.params for request in requests]
        vocab = self.config.vocab_size
        self.batch = batch
        self.longest = max(len(request.prompt) for request in requests)
        tokens = np.zeros((batch, self.capacity), np.int64)
        noise = np.zeros((batch, self.capacity), np.int32)
        for row, request in enumerate(requests):
            given = (*request.prompt, *request.forced)[: request.limit]
            tokens[row, : len(given)] = given
            if request.params.temperature > 0:
                noise[row, : request.limit] = noise_keys(request.seed, request.stream, request.limit)
        self._fill(self.tokens, tokens)
        self._fill(self.noise, noise)
        self._fill(self.length, [len(request.prompt) for request in requests])
        self._fill(self.known, [len(request.prompt) + len(request.forced) for request in requests])
        self._fill(self.limit, [request.limit for request in requests])
        self._fill(self.min_length, [len(request.prompt) + request.params.min_tokens for request in requests])
        self._fill(self.top_k, [min(p.top_k or vocab, vocab) for p in params])
        self._fill(self.temperature, [p.temperature for p in params])
        self._fill(self.top_p, [p.top_p for p in params])
        self._fill(self.min_p, [p.min_p for p in params])
        self._fill(self.penalty, [p.repetition_penalty for p in params])
        self._fill(self.stops_at_eos, [not p.ignore_eos for p in params])
        self._fill(self.done, [False] * batch)
        self.length[batch:], self.done[batch:] = 1, True  # rows not in use may be computed along
        self._fill(self.broken, [False] * batch)
        sampled = [p for p in params if p.temperature > 0]
        tops = [p.logprobs for p in params if p.logprobs is not None]
        self.needs = Needs(
            penalty=any(p.repetition_penalty != 1 for p in params),
            min_length=any(p.min_tokens > 0 for p in params),
            random=bool(sampled),
            candidates=max((min(p.top_k or vocab, vocab) for p in sampled if p.top_k or p.top_p < 1), default=0),
            min_p=any(p.min_p > 0 for p in sampled),
            logprobs=max(tops) if tops else None,
        )
        if self.needs.logprobs is not None:
            self._allocate_logprobs(min(self.needs.logprobs, vocab))

    def _fill(self, buffer: Tensor, values: np.ndarray | list[int] | list[float] | list[bool]) -> None:
        buffer[: self.batch].copy_(torch.as_tensor(values), non_blocking=True)

    def _allocate_logprobs(self, top: int) -> None:
        """On first use, and again only if more are wanted than ever before."""
        if self.top_token is None or self.top_token.shape[-1] < top:
            shape = (self.rows, self.capacity)
            self.logprob = torch.zeros(shape, device=self.device)
            self.top_logprob = torch.zeros(*shape, top, device=self.device)
            self.top_token = torch.zeros(*shape, top, dtype=torch.long, device=self.device)

    def finish(self, rows: list[int]) -> None:
        """The host ended these rows, at a stop text for instance."""
        if rows:
            self.done[rows] = True

    def read(self, first: int) -> Progress:
        """Bring over what was generated from position `first` on: the one place where the host waits."""
        batch, last = self.batch, self.longest
        columns = [self.length[:batch, None], self.broken[:batch, None], self.tokens[:batch, first:last]]
        packed = torch.cat(columns, dim=1).cpu().numpy()
        wanted = self.needs.logprobs is not None
        more = [
            buffer[:batch, first:last].cpu().numpy() if wanted and buffer is not None else None
            for buffer in (self.logprob, self.top_logprob, self.top_token)
        ]
        length, broken, tokens = packed[:, 0], packed[:, 1], packed[:, 2:]
        self.longest = int(length.max())
        return Progress(first, length, broken, tokens, *more)


def noise_keys(seed: int, stream: int, count: int) -> np.ndarray:
    """Philox, a counter-based generator: key t depends on nothing but (seed, stream, t)."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))
    return generator.integers(-(2**31), 2**31, count, dtype=np.int32)
