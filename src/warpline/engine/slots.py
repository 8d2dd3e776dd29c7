"""Slots: memory of running sequences on the device. Each slot has a part of the KV cache and a record.

A sequence is admitted into a free slot and released from it independently of the others. An executor reads the newest
token and its position from the slot and writes the next token there, so nothing is handed over per token. Steps work on
lanes: a table on the device maps each lane of a launch to a slot, so compiled or captured code serves any slots.

Row s of `tokens` holds a prompt and then the generated tokens; the first `length[s]` are valid. Randomness is a table
too: the noise of all tokens at position t follows from the 32-bit key `noise[s, t]`. The keys follow from the request's
seed, prompt and sample number alone, so a sequence draws the same in any batch, and no executor keeps a generator.
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

#: The fields of a slot's record, by type. They are rows of one matrix per type.
INTEGERS = ("length", "known", "limit", "min_length", "top_k", "reported")
FLOATS = ("temperature", "top_p", "min_p", "penalty", "presence", "frequency")
FLAGS = ("stops_at_eos", "biased", "done", "not_finite")


class Record:
    """The fields of slot records, each with one element per slot."""

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
    """Device memory for `count` sequences of up to `capacity` positions, and one more slot, `parking`, for unused lanes
    of a launch: its record is done, and its contents do not matter.

    Contract of a step, for every lane whose slot is not done: the executor takes the token at length - 1 and stores its
    K and V at that position. Then, as `sampling.advance` does in torch, it writes the next token at `length` (while
    length < known, the token already there stays), sets `not_finite` if the logits are not finite, fills the logprob
    buffers if a sequence wants them, adds 1 to `length`, sets `done` at the end of text (if stops_at_eos) or at
    `limit`, and if `biased` subtracts `frequency` from the token's `bias`, the first time `presence` too.
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
        # Used where a slot is `biased`: the value added to each token's logit, and how often the token has been
        # appended.
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
        self.fault = torch.zeros(1, dtype=torch.int32, device=device)  # set by a launch that ended itself
        self.logprob: Tensor | None = None  # [slots, capacity]; allocated at the first use
        self.top_logprob: Tensor | None = None  # [slots, capacity, K]
        self.top_token: Tensor | None = None
        self._free = list(range(count))  # a heap: lowest slot first
        self._requests: list[Request | None] = [None] * rows
        self._needs = [Needs()] * rows
        #: Transfers requests in and tokens out: by ops of the catalog, by numpy or by torch.
        kind = KernelCrossing if native else HostCrossing if device.type == "cpu" else TorchCrossing
        self.crossing: Crossing = kind(self)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def request(self, slot: int) -> Request:
        """Return the request that occupies the slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def needs(self, lanes: Sequence[int]) -> Needs:
        """Return what the sequences in these slots need together."""
        return joined(map(self._needs.__getitem__, lanes))

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Give each request a free slot and write its record. Launches in flight do not affect it."""
        if not requests:
            return []
        if len(requests) > len(self._free):
            raise ConfigError(f"{len(requests)} sequences do not fit into {len(self._free)} free slots")
        params = {id(request.params): request.params for request in requests}  # often one object for all
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
        """Return a report of at most `most` new tokens of each slot. Requires: behind the `last` one of a turn nothing
        that takes long is enqueued."""
        kept = {}
        if self.logprob is not None:  # later steps overwrite them
            buffers = [b for b in (self.logprob, self.top_logprob, self.top_token) if b is not None]
            wanting = [slot for slot in lanes if self._needs[slot].logprobs is not None]
            kept = {slot: tuple(buffer[slot].clone() for buffer in buffers) for slot in wanting}
        return self.crossing.report(lanes, most, kept, last=last)

    def release(self, slot: int) -> None:
        """Return the slot to the free list; launches already enqueued may still write to it."""
        assert self._requests[slot] is not None, f"slot {slot} was released twice"
        self._requests[slot] = None
        heapq.heappush(self._free, slot)

    def erase(self, slot: int) -> None:
        """Zero a slot's cache. Otherwise NaN or infinity in it would reach the slot's next sequence through torch's
        attention, which multiplies masked values by 0."""
        for cache in self.cache.tensors:
            cache[:, slot].zero_()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of a slot's cache to other slots."""
        index = torch.tensor(targets, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        for cache in self.cache.tensors:  # [layer, slot, head, position, depth]
            cache[:, index, :, :length] = cache[:, source : source + 1, :, :length]

    def _room_for_logprobs(self, top: int | None) -> None:
        """Allocate the logprob buffers at the first use, and again if more alternatives are wanted than before."""
        if top is None:
            return
        top = min(top, self.config.vocab_size)
        before = self.top_token
        if before is not None and before.shape[-1] >= top:
            return
        shape = self.tokens.shape
        logprob, top_logprob = torch.zeros(shape, device=self.device), torch.zeros(*shape, top, device=self.device)
        top_token = torch.zeros(*shape, top, dtype=torch.long, device=self.device)
        if before is not None:  # what running sequences have so far
            assert self.logprob is not None
            assert self.top_logprob is not None
            logprob = self.logprob
            top_logprob[..., : before.shape[-1]] = self.top_logprob
            top_token[..., : before.shape[-1]] = before
        self.logprob, self.top_logprob, self.top_token = logprob, top_logprob, top_token
