"""Everything a running batch needs, on the device, allocated once and used again by the next request.

An executor reads the newest token and its position here and writes the next one here, so nothing is handed over
per token. Row b of `tokens` holds its prompt and then what was generated; `length[b]` says how much of it is valid.
Randomness is a table too: from the 32-bit key `noise[b, t]` follows the noise of every token at position t. It comes
from the row's seed, prompt and sample number alone, so a row draws the same whatever it is batched with, and no
executor keeps a generator.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpline.config import ModelConfig, SamplingParams
from warpline.model.gpt2 import KVCache


class Request(NamedTuple):
    """One row to be generated."""

    prompt: Rows[int] | np.ndarray | Tensor  # a tensor on the state's device goes nowhere else
    params: SamplingParams
    seed: int
    sample: int  # which of the n completions of the prompt
    limit: int  # length at which the row ends, prompt included
    forced: Rows[int] = ()  # tokens to take instead of drawing, for scoring a given text

    @property
    def stream(self) -> int:
        """Which of a seed's random streams the row uses: prompts and samples that differ draw independently."""
        prompt = self.prompt.tolist() if isinstance(self.prompt, Tensor) else self.prompt
        content = np.array([self.sample, *prompt], dtype=np.int64).tobytes()
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

    @property
    def end(self) -> str:
        """What a step has to end with, as `schedule.decode_step` has it."""
        if self.logprobs is not None:
            return "logits"
        return "drawn" if self.penalty or self.random or self.min_length else "likeliest"


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


#: What there is one of for each row, in the order of `_fields`. They lie side by side: one copy sets them all.
_FIELDS = {
    "length": torch.int64,
    "known": torch.int64,
    "limit": torch.int64,
    "min_length": torch.int64,
    "top_k": torch.int64,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "penalty": torch.float32,
    "stops_at_eos": torch.bool,
    "done": torch.bool,
    "broken": torch.bool,
}
#: Of top-k where there is none; no vocabulary is as large.
ALL_TOKENS = 2**31 - 1

#: Views of prompts' places that are kept.
MOST_PLACES = 1024
#: Of a row that is in no batch; it may be computed along.
_UNUSED = (1, 1, 1, 1, 1, 0.0, 1.0, 0.0, 1.0, False, True, False)


def _needs(params: tuple[SamplingParams, ...], vocab: int) -> Needs:
    """Of rows with these settings among them."""
    sampled = [p for p in params if p.temperature > 0]
    tops = [p.logprobs for p in params if p.logprobs is not None]
    return Needs(
        penalty=any(p.repetition_penalty != 1 for p in params),
        min_length=any(p.min_tokens > 0 for p in params),
        random=bool(sampled),
        candidates=max((min(p.top_k or vocab, vocab) for p in sampled if p.top_k or p.top_p < 1), default=0),
        min_p=any(p.min_p > 0 for p in sampled),
        logprobs=max(tops) if tops else None,
    )


def _fields(request: Request, given: int, vocab: int) -> tuple[float, ...]:
    """A row's values, before its first token."""
    p = request.params
    known, top = given + len(request.forced), p.top_k if 0 < p.top_k < vocab else ALL_TOKENS
    settings = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, not p.ignore_eos)
    return (given, known, request.limit, given + p.min_tokens, top, *settings, False, False)


class State:
    """Device buffers for up to `rows` sequences of up to `capacity` positions.

    For every row that is not done, an executor's step takes the token at length - 1, stores its K and V in that slot,
    and then, as `sampling.advance` does in torch: writes the next token at `length` (the one that stands there already
    while length < known), sets `broken` if the logits are not finite, fills the logprob buffers if there are any, adds
    1 to `length`, and sets `done` at the end of text (where stops_at_eos) or at `limit`.
    """

    length: Tensor
    known: Tensor
    limit: Tensor
    min_length: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    stops_at_eos: Tensor
    done: Tensor
    broken: Tensor

    def __init__(self, config: ModelConfig, rows: int, capacity: int, *, device: torch.device, dtype: torch.dtype):
        self.config, self.rows, self.capacity, self.device = config, rows, capacity, device
        self.cache = KVCache(config, rows, capacity, device=device, dtype=dtype)
        self._noise = _Mirrored(rows * capacity, torch.int32, device)
        self.noise = self._noise.there.view(rows, capacity)
        # The fields of all rows as they are in the beginning, then row by row the tokens: one copy brings what a batch
        # needs of both. The fields that change are a copy on the device.
        width = sum(kind.itemsize for kind in _FIELDS.values())
        self._initial_end = -(-rows * width // 8) * 8
        self._current = torch.zeros(self._initial_end, dtype=torch.uint8, device=device)
        self._packed = _Mirrored(self._initial_end + rows * capacity * 8, torch.uint8, device)
        self.tokens = self._packed.there[self._initial_end :].view(torch.int64).view(rows, capacity)
        self._tokens_here = self._packed.here[self._initial_end :].view(torch.int64).view(rows, capacity).numpy()
        self._initial_here: list[np.ndarray] = []
        end = 0
        for name, kind in _FIELDS.items():
            begin, end = end, end + rows * kind.itemsize
            setattr(self, name, self._current[begin:end].view(kind))
            self._initial_here.append(self._packed.here[begin:end].view(kind).numpy())
        self.logprob: Tensor | None = None
        self.top_logprob: Tensor | None = None
        self.top_token: Tensor | None = None
        self.batch = 0
        self.longest = 0  # no row is longer; known on the host without asking the device
        self.needs = Needs(False, False, False, 0, False, None)
        self.may_end = False  # whether a row may be done before its limit
        #: Sets every field to what it begins with: nothing of the last batch counts any more. Whoever runs prompts does
        #: this first. It may be part of a graph, and knows tensors, not the state: who keeps it does not keep that.
        self.restart: Callable[[], object] = partial(self._current.copy_, self._packed.there[: self._initial_end])
        #: What the device's fields begin with: of every row its settings, limit, length and forced tokens.
        self._asked: list[tuple[SamplingParams, int, int, tuple[int, ...]]] | None = None
        self._places: dict[tuple[int, int, int], Tensor] = {}  # of tokens, for prompts that are on the device
        #: What executors have bound to this memory, under keys of their own; it goes when the state goes.
        self.kept: dict[Hashable, Any] = {}

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether a batch of this size can be begun here."""
        return rows <= self.rows and capacity <= self.capacity

    def begin(self, requests: Rows[Request]) -> None:
        """Take in a new batch, which counts from `restart` on. The GPU waits for this: it should be short, and most of
        all where a batch is like the last one but for its tokens, which are there already."""
        batch, prompts = len(requests), [request.prompt for request in requests]
        lengths = [prompt.shape[0] if isinstance(prompt, Tensor) else len(prompt) for prompt in prompts]
        there = [row for row, prompt in enumerate(prompts) if isinstance(prompt, Tensor)]
        asked = [(r.params, r.limit, length, tuple(r.forced)) for r, length in zip(requests, lengths, strict=True)]
        self.batch, self.longest = batch, max(lengths)
        sent = 0
        if asked != self._asked:
            self._asked = None  # until it has been sent
            self._fill(requests, lengths)
            sent = self._initial_end
        if len(there) < batch or any(request.forced for request in requests):
            self._packed.ready()
            for row, (request, given) in enumerate(zip(requests, lengths, strict=True)):
                if not isinstance(request.prompt, Tensor):
                    self._tokens_here[row, :given] = request.prompt
                forced = request.forced[: request.limit - given]
                self._tokens_here[row, given : given + len(forced)] = forced
            sent = self._initial_end + batch * self.capacity * 8
        if sent:
            self._packed.send(sent)
        self._asked = asked
        self._copy(prompts, lengths, there)
        if self.needs.random:
            noise = self._noise.ready().view(self.rows, self.capacity).numpy()
            for row, request in enumerate(requests):
                if request.params.temperature > 0:
                    noise[row, : request.limit] = noise_keys(request.seed, request.stream, request.limit)
            self._noise.send(batch * self.capacity)
        if self.needs.logprobs is not None:
            self._allocate_logprobs(min(self.needs.logprobs, self.config.vocab_size))

    def _fill(self, requests: Rows[Request], lengths: list[int]) -> None:
        """What these rows begin with, on the host, and what they need."""
        batch, vocab, first = len(requests), self.config.vocab_size, requests[0]
        alike = all(r.params is first.params and r.limit == first.limit and not r.forced for r in requests)
        if alike and min(lengths) == max(lengths):  # as mostly
            values: tuple[Any, ...] = _fields(first, lengths[0], vocab)
        else:
            values = tuple(zip(*map(_fields, requests, lengths, itertools.repeat(vocab)), strict=True))
        self._packed.ready()
        for column, value, unused in zip(self._initial_here, values, _UNUSED, strict=True):
            column[:batch] = value
            column[batch:] = unused
        params = (first.params,) if alike else tuple({id(r.params): r.params for r in requests}.values())
        self.needs = _needs(params, vocab)
        self.may_end = self.config.eos_token_id is not None and not all(p.ignore_eos for p in params)

    def _copy(self, prompts: list[Any], lengths: list[int], there: list[int]) -> None:
        """Those that are on the device, all at once where they are of one length."""
        if len(there) == len(prompts) > 1 and min(lengths) == max(lengths):
            self._place(0, len(prompts), lengths[0]).copy_(_together(prompts))
            return
        for row in there:
            self._place(row, 1, lengths[row]).copy_(prompts[row])

    def _place(self, row: int, count: int, length: int) -> Tensor:
        """Where the first tokens of some rows are."""
        key = row, count, length
        if key not in self._places:
            if len(self._places) >= MOST_PLACES:
                self._places.clear()
            self._places[key] = self.tokens[row : row + count, :length]
        return self._places[key]

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


def _together(rows: list[Tensor]) -> Tensor:
    """Rows of one length as a matrix; if they are the rows of one, that is it."""
    base = rows[0]._base
    if base is not None and base.shape == (len(rows), len(rows[0])):
        first, step = base.storage_offset(), base.stride(0)
        if all(row._base is base and row.storage_offset() == first + i * step for i, row in enumerate(rows)):
            return base
    return torch.stack(rows)


def room_for(config: ModelConfig, rows: int, capacity: int, before: State | None) -> tuple[int, int]:
    """Rows and positions of a state that serves such a batch, and what the one `before` it has served."""
    if before is not None:
        rows, capacity = max(rows, before.rows), max(capacity, before.capacity)
    return rows, min(-(-capacity // 128) * 128, config.n_positions)


class _Mirrored:
    """A buffer on the device and one like it on the host, from which it is filled without waiting."""

    def __init__(self, count: int, kind: torch.dtype, device: torch.device):
        on_gpu = device.type == "cuda"
        self.there = torch.zeros(count, dtype=kind, device=device)
        self.here = torch.zeros(count, dtype=kind, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}  # that were sent

    def ready(self) -> Tensor:
        """The host's, once nobody is reading it any more."""
        if self._sent is not None:
            self._sent.synchronize()
        return self.here

    def send(self, count: int) -> None:
        """Bring the first elements over."""
        if count not in self._parts:
            self._parts[count] = self.there[:count], self.here[:count]
        there, here = self._parts[count]
        there.copy_(here, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.there.device))


def noise_keys(seed: int, stream: int, count: int) -> np.ndarray:
    """Philox, a counter-based generator: key t depends on nothing but (seed, stream, t)."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))
    return generator.integers(-(2**31), 2**31, count, dtype=np.int32)
