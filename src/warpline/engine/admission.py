"""The fields of new sequences as the op `admit` reads them: one row per sequence, in memory that the device reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpline.config import MOST_BIASES, SamplingParams
from warpline.engine.request import Request

#: Value of top-k without a limit; no vocabulary is as large.
ALL_TOKENS = 2**31 - 1


class Admission:
    """The fields of new sequences, one row each. The same memory is filled again for every admission."""

    def __init__(self, rows: int, capacity: int, *, pinned: bool):
        def room(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, pin_memory=pinned)

        #: In the order of the arguments of the op `admit`.
        self.tensors = (
            room(torch.int64, rows).fill_(-1),  # lanes, -1 without a sequence
            # integers: length, known, limit, min_length, top_k, start of its tokens, start and number of its biases
            room(torch.int64, rows, 8),
            room(torch.float32, rows, 6),  # floats: temperature, top_p, min_p, penalty, presence, frequency
            room(torch.bool, rows, 2),  # flags: stops_at_eos, biased
            room(torch.int64, rows),  # stream: key of its random numbers
            room(torch.int32, rows * capacity),  # given: prompts and forced tokens, concatenated
            room(torch.int32, rows * MOST_BIASES),  # biased_tokens, and
            room(torch.float32, rows * MOST_BIASES),  # biases: added to the logits of these tokens
        )
        arrays = [tensor.numpy() for tensor in self.tensors]
        self.lanes, self.integers, self.floats, self.flags, self.stream, self.given, *biases = arrays
        self.biased_tokens, self.biases = biases
        self.count = 0

    def fill(self, requests: Sequence[Request], vocab: int) -> None:
        """Write the rows of `requests`; the lanes are written when the slots are known."""
        given, n = [_given(request) for request in requests], len(requests)
        begins = [*itertools.accumulate(map(len, given), initial=0)]
        params = {id(request.params): request.params for request in requests}  # often one object for all
        settings = {key: _settings(its, vocab) for key, its in params.items()}
        found = (
            [settings[id(request.params)] for request in requests] if len(settings) > 1 else [*settings.values()] * n
        )
        integers = self.integers[:n]
        integers[:, 0] = [len(request.prompt) for request in requests]
        integers[:, 1] = [len(ids) for ids in given]
        integers[:, 2] = [request.limit for request in requests]
        integers[:, 3] = integers[:, 0] + [its.min_tokens for its in found]
        integers[:, 4] = [its.top_k for its in found]
        integers[:, 5] = begins[:n]
        self._fill_biases(found)
        self.floats[:n] = [its.floats for its in found]
        self.flags[:n] = [its.flags for its in found]
        streams = [request.stream if its.floats[0] > 0 else 0 for request, its in zip(requests, found, strict=True)]
        self.stream[:n] = np.array(streams, np.uint64).view(np.int64)
        np.concatenate(given, out=self.given[: begins[-1]], casting="same_kind")
        self.lanes[n : self.count] = -1
        self.count = n

    def _fill_biases(self, settings: Sequence[_Settings]) -> None:
        counts = [len(its.biases) for its in settings]
        ends = [*itertools.accumulate(counts, initial=0)]
        self.integers[: len(counts), 6], self.integers[: len(counts), 7] = ends[:-1], counts
        for its, begin in zip(settings, ends, strict=False):
            if its.biases:
                part = slice(begin, begin + len(its.biases))
                self.biased_tokens[part], self.biases[part] = zip(*its.biases, strict=True)

    def tokens(self) -> list[np.ndarray]:
        """Return the given tokens (prompt and forced tokens) of each sequence."""
        return [self.given[begin : begin + known] for known, begin in self.integers[: self.count, [1, 5]].tolist()]

    def adjusted(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return, for each sequence that adjusts tokens: its row, token ids, and the values to add to their logits."""
        found = []
        for row in np.flatnonzero(self.flags[: self.count, 1]).tolist():
            begin, count = self.integers[row, 6:8].tolist()
            found.append((row, self.biased_tokens[begin : begin + count], self.biases[begin : begin + count]))
        return found


def _given(request: Request) -> np.ndarray:
    ids = np.asarray(request.prompt, np.int64)
    if not len(request.forced):
        return ids
    return np.concatenate((ids, np.asarray(request.forced[: request.limit - len(ids)], np.int64)))


class _Settings(NamedTuple):
    """Sampling parameters in the form of slot records."""

    min_tokens: int
    top_k: int
    flags: tuple[bool, bool]
    floats: tuple[float, ...]
    biases: tuple[tuple[int, float], ...]


def _settings(params: SamplingParams, vocab: int) -> _Settings:
    top = params.top_k if 0 < params.top_k < vocab else ALL_TOKENS
    floats = (
        params.temperature, params.top_p, params.min_p, params.repetition_penalty, params.presence_penalty,
        params.frequency_penalty,
    )  # fmt: skip
    return _Settings(params.min_tokens, top, (not params.ignore_eos, params.adjusts_tokens), floats, params.biases)
