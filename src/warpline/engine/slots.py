"""Slots: where running sequences live on the device. Each has its part of the KV cache and a record of its own.

A sequence is admitted into a free slot and released from it, whatever the others do. An executor reads the newest token
and its position from the slot and writes the next one there, so nothing is handed over per token. Steps work on lanes:
a table on the device says which slot each lane of a launch is, so what was compiled or captured serves any slots.

Row s of `tokens` holds a prompt and then what was generated; `length[s]` says how much of it is valid. Randomness is a
table too: from the 32-bit key `noise[s, t]` follows the noise of every token at position t. It comes from the request's
seed, prompt and sample number alone, so a sequence draws the same in any company, and no executor keeps a generator.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from warpline.config import ModelConfig
from warpline.engine.crossing import Crossing, HostCrossing, KernelCrossing, Report, TorchCrossing
from warpline.engine.request import Needs, Request, joined, needs_of
from warpline.errors import ConfigError
from warpline.model.kv_cache import KVCache

#: The record of a slot: what there is one of for each. They are rows of one matrix per type.
INTEGERS = ("length", "known", "limit", "min_length", "top_k", "reported")
FLOATS = ("temperature", "top_p", "min_p", "penalty", "presence", "frequency")
FLAGS = ("stops_at_eos", "biased", "done", "not_finite")


class Record:
    """The fields of slots, one of each for every slot."""

    length: Tensor
    known: Tensor
    limit: Tensor
    min_length: Tensor
    top_k: Tensor
    reported: Tensor  # length up to which the host knows the tokens
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    presence: Tensor
    frequency: Tensor
    stops_at_eos: Tensor
    biased: Tensor  # whether the slot's rows of `bias` and `counts` are used
    done: Tensor
    not_finite: Tensor


class Slots(Record):
    """Device memory for `count` sequences of up to `capacity` positions, and one slot more, `parking`, for lanes that a
    launch has and nothing uses: its record is done, and what happens to it does not matter.

    For every lane whose slot is not done, an executor's step takes the token at length - 1, stores its K and V at that
    position, and then, as `sampling.advance` does in torch: writes the next token at `length` (the one that stands
    there already while length < known), sets `not_finite` if the logits are not finite, fills the logprob buffers where
    some sequence wants them, adds 1 to `length`, sets `done` at the end of text (where stops_at_eos) or at `limit`, and
    where `biased` takes `frequency` off the token's `bias`, the first time `presence` too.
    """

    def __init__(
        self,
        config: ModelConfig,
        count: int,
        capacity: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        native: bool = False,
    ):
        self.config, self.count, self.capacity, self.device = config, count, capacity, device
        self.parking, rows = count, count + 1
        self.cache = KVCache(config, rows, capacity, device=device, dtype=dtype)
        self.tokens = torch.zeros(rows, capacity, dtype=torch.int64, device=device)
        self.noise = torch.zeros(rows, capacity, dtype=torch.int32, device=device)
        # Where a slot is `biased`: what is added to each token's logit, and how often the token has been appended.
        self.bias = torch.zeros(rows, config.vocab_size, device=device)
        self.counts = torch.zeros(rows, config.vocab_size, dtype=torch.int32, device=device)
        self.integers = torch.zeros(len(INTEGERS), rows, dtype=torch.int64, device=device)
        self.floats = torch.zeros(len(FLOATS), rows, device=device)
        self.flags = torch.zeros(len(FLAGS), rows, dtype=torch.bool, device=device)
        for names, matrix in ((INTEGERS, self.integers), (FLOATS, self.floats), (FLAGS, self.flags)):
            for name, row in zip(names, matrix, strict=True):
                setattr(self, name, row)
        for name in ("length", "known", "limit", "top_k", "top_p", "penalty", "done"):
            getattr(self, name).fill_(1)
        self.fault = torch.zeros(1, dtype=torch.int32, device=device)  # set by a launch that had to end itself
        self.logprob: Tensor | None = None  # [slots, capacity]; allocated when they are first asked for
        self.top_logprob: Tensor | None = None  # [slots, capacity, K]
        self.top_token: Tensor | None = None
        self._free = list(range(count))  # a heap: the lowest first
        self._requests: list[Request | None] = [None] * rows
        self._needs = [Needs()] * rows
        #: How requests get in and tokens out: by ops of the catalog, by numpy or by torch.
        kind = KernelCrossing if native else HostCrossing if device.type == "cpu" else TorchCrossing
        self.crossing: Crossing = kind(self)

    @property
    def free(self) -> int:
        """How many sequences can be admitted."""
        return len(self._free)

    def request(self, slot: int) -> Request:
        """What the slot was given to."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def needs(self, lanes: Sequence[int]) -> Needs:
        """What these sequences need together."""
        return joined(map(self._needs.__getitem__, lanes))

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Give each request a free slot and write its record. Launches that are under way do not matter to it."""
        if not requests:
            return []
        if len(requests) > len(self._free):
            raise ConfigError(f"{len(requests)} sequences do not fit into {len(self._free)} free slots")
        params = {id(request.params): request.params for request in requests}  # often one for all
        needs = {key: needs_of(its, self.config.vocab_size) for key, its in params.items()}
        self._room_for_logprobs(joined(needs.values()).logprobs)
        self.crossing.stage(requests)
        slots = [heapq.heappop(self._free) for _ in requests]
        for slot, request in zip(slots, requests, strict=True):
            self._requests[slot], self._needs[slot] = request, needs[id(request.params)]
        try:
            self.crossing.admit(slots)
        except BaseException:
            for slot in slots:
                self.release(slot)
            raise
        return slots

    def report(self, lanes: Sequence[int], most: int, *, last: bool = True) -> Report:
        """What these slots have got since the last report, which is `most` tokens each at most. Unless it is the `last`
        of a turn, what takes long is enqueued behind it."""
        kept = {}
        if self.logprob is not None:  # what follows writes there
            buffers = [b for b in (self.logprob, self.top_logprob, self.top_token) if b is not None]
            wanting = [slot for slot in lanes if self._needs[slot].logprobs is not None]
            kept = {slot: tuple(buffer[slot].clone() for buffer in buffers) for slot in wanting}
        return self.crossing.report(lanes, most, kept, last=last)

    def release(self, slot: int) -> None:
        """The sequence is over: its slot is free, though launches under way may still write to it."""
        assert self._requests[slot] is not None, f"slot {slot} was released twice"
        self._requests[slot] = None
        heapq.heappush(self._free, slot)

    def erase(self, slot: int) -> None:
        """What is no number in a slot's cache would reach the next sequence through torch's attention, which multiplies
        what it masks by 0."""
        for cache in self.cache.tensors:
            cache[:, slot].zero_()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Have the first positions of a slot's cache in others as well."""
        index = torch.tensor(targets, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        for cache in self.cache.tensors:  # [layer, slot, head, position, depth]
            cache[:, index, :, :length] = cache[:, source : source + 1, :, :length]

    def _room_for_logprobs(self, top: int | None) -> None:
        """On first use, and again only if more are wanted than ever before."""
        if top is None:
            return
        top = min(top, self.config.vocab_size)
        before = self.top_token
        if before is not None and before.shape[-1] >= top:
            return
        shape = self.tokens.shape
        logprob, top_logprob = torch.zeros(shape, device=self.device), torch.zeros(*shape, top, device=self.device)
        top_token = torch.zeros(*shape, top, dtype=torch.long, device=self.device)
        if before is not None:  # what running sequences have found so far
            assert self.logprob is not None
            assert self.top_logprob is not None
            logprob = self.logprob
            top_logprob[..., : before.shape[-1]] = self.top_logprob
            top_token[..., : before.shape[-1]] = before
        self.logprob, self.top_logprob, self.top_token = logprob, top_logprob, top_token
