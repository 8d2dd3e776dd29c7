"""Between host and device: requests into slots, tokens out of them, each with one copy for any number of sequences.

On a GPU kernels do the rest, or torch where nothing can be compiled; on a CPU numpy does.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpline.kernels.noise import noise_keys

if TYPE_CHECKING:
    from warpline.engine.slots import Slots

DONE, BROKEN, FAULT = 1, 2, 4
#: Tokens of a report or a prompt are rounded up to a multiple of this, so that few shapes are bound.
STEP = 32


@dataclass(frozen=True, slots=True)
class Admission:
    """What new sequences bring, a row for each."""

    whole: np.ndarray  # int64 [n, 5]: length, known, limit, min_length, top_k
    numbers: np.ndarray  # float32 [n, 4]: temperature, top_p, min_p, penalty
    flags: np.ndarray  # bool [n]: stops_at_eos
    stream: np.ndarray  # uint64 [n]: key of its randomness
    given: list[np.ndarray]  # of each its tokens: prompt and forced ones


class Logprobs(NamedTuple):
    """What a slot has found of log-probabilities, position by position."""

    logprob: np.ndarray  # [capacity]
    top_logprob: np.ndarray  # [capacity, K]
    top_token: np.ndarray


class News(NamedTuple):
    """What lanes have got since the last report."""

    counts: np.ndarray  # [n]: tokens
    flags: np.ndarray  # [n]: DONE, BROKEN, FAULT
    tokens: np.ndarray  # [n, most]: the first `counts` of each row
    logprobs: dict[int, Logprobs]  # of slots that want them


class Progress:
    """How many blocks were sent to the device, and how many are known to have left the host's memory: those behind
    which a report has come back. So nothing is asked of the driver in an ordinary turn."""

    def __init__(self) -> None:
        self.sent = self.left = 0


class Report:
    """News on their way."""

    def __init__(
        self,
        packed: Tensor,
        logprobs: dict[int, tuple[Tensor, ...]],
        landed: torch.cuda.Event | None = None,
        progress: Progress | None = None,
    ):
        self._packed, self._logprobs, self._landed = packed, logprobs, landed
        self._progress, self._sent = progress, 0 if progress is None else progress.sent
        self._news: News | None = None

    def wait(self) -> News:
        """The one place where the host waits for the device."""
        if self._news is None:
            if self._landed is not None:
                self._landed.synchronize()
            if self._progress is not None:
                self._progress.left = max(self._progress.left, self._sent)
            packed = self._packed.cpu().numpy().copy()  # the memory is used again
            found = {slot: Logprobs(*(t.cpu().numpy() for t in rows)) for slot, rows in self._logprobs.items()}
            self._news = News(packed[:, 0], packed[:, 1], packed[:, 2:], found)
        return self._news


class Staging:
    """Memory of the host from which blocks go to the device without waiting. It is written again when the last block
    has left it."""

    def __init__(self, target: Tensor, progress: Progress):
        self._target, self._progress, self._last = target, progress, 0
        self._here = torch.zeros(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
        self._array = self._here.numpy()
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def ready(self) -> np.ndarray:
        """The memory, once it may be written."""
        if self._last > self._progress.left and self._target.is_cuda:
            torch.cuda.current_stream(self._target.device).synchronize()
        return self._array

    def send(self, count: int) -> None:
        """Bring the first elements over."""
        if (part := self._parts.get(count)) is None:
            part = self._parts[count] = self._target[:count], self._here[:count]
        part[0].copy_(part[1], non_blocking=True)
        self._progress.sent += 1
        self._last = self._progress.sent


class Crossing(ABC):
    """Into and out of one `Slots`."""

    def __init__(self, slots: Slots):
        self._tokens, self._noise, self._fault = slots.tokens, slots.noise, slots.fault
        self._whole, self._numbers, self._flags = slots.whole, slots.numbers, slots.flags
        self._length, self._reported, self._done, self._broken = slots.length, slots.reported, slots.done, slots.broken
        self._device, self._parking, self._pinned = slots.device, slots.parking, slots.device.type == "cuda"
        self._lanes = torch.full((-(-(slots.count + 1) // 64) * 64,), slots.parking, device=slots.device)
        self.progress = Progress()
        self._tables = [Staging(self._lanes, self.progress) for _ in range(2)]  # a turn may select twice
        self._selected: tuple[int, ...] = ()
        self._used = 0  # entries of the table that may not be parked

    @abstractmethod
    def admit(self, slots: Sequence[int], admission: Admission) -> None:
        """Write the records of new sequences."""

    def select(self, lanes: Sequence[int], rows: int) -> Tensor:
        """The table lane → slot on the device, int64 [rows], always at the same address; lanes that nothing uses are
        parked."""
        chosen = tuple(lanes)
        if chosen != self._selected:
            self._tables.reverse()
            table, known = self._tables[0].ready(), self._used
            table[: len(chosen)], table[len(chosen) : known] = chosen, self._parking
            self._selected, self._used = (), max(known, len(chosen))  # until it has been sent
            self._tables[0].send(self._used)
            self._selected, self._used = chosen, len(chosen)
        return self._lanes[:rows]

    @abstractmethod
    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]]) -> Report:
        """What these slots have got since the last report; `logprobs` travels along."""


class HostCrossing(Crossing):
    """Where the slots are the host's own memory: by numpy, which is quicker there than torch."""

    def admit(self, slots: Sequence[int], admission: Admission) -> None:
        """Straight into the records."""
        whole, numbers, flags = self._whole.numpy(), self._numbers.numpy(), self._flags.numpy()
        whole[:-1, slots], whole[-1, slots] = admission.whole.T, admission.whole[:, 0]
        numbers[:, slots] = admission.numbers.T
        flags[0, slots], flags[1:, slots] = admission.flags, False
        tokens, noise = self._tokens.numpy(), self._noise.numpy()
        for slot, ids in zip(slots, admission.given, strict=True):
            tokens[slot, : len(ids)] = ids
        drawn = np.flatnonzero(admission.numbers[:, 0] > 0)
        if len(drawn):
            count = min(int(admission.whole[drawn, 2].max()), noise.shape[1])
            noise[np.array(slots)[drawn], :count] = noise_keys(admission.stream[drawn], count)

    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]]) -> Report:
        """It is all here."""
        index, tokens, known = list(lanes), self._tokens.numpy(), self._reported.numpy()
        reported = known[index]
        count = np.minimum(self._length.numpy()[index] - reported, most)
        known[index] = reported + count
        packed = np.full((len(index), 2 + most), -1, np.int64)
        packed[:, 0] = count
        packed[:, 1] = self._done.numpy()[index] * DONE + self._broken.numpy()[index] * BROKEN
        for row, slot, first, n in zip(packed, index, reported.tolist(), count.tolist(), strict=True):
            row[2 : 2 + n] = tokens[slot, first : first + n]
        return Report(torch.from_numpy(packed), logprobs)


class TorchCrossing(Crossing):
    """By torch's operators, for a GPU on which nothing of ours runs."""

    def admit(self, slots: Sequence[int], admission: Admission) -> None:
        """A few operators for each kind of field."""
        index, width = self._sent(np.array(slots)), max(map(len, admission.given))
        self._whole[:-1, index] = self._sent(admission.whole.T)
        self._reported[index] = self._length[index]
        self._numbers[:, index] = self._sent(admission.numbers.T)
        self._flags[:, index] = False
        self._flags[0, index] = self._sent(admission.flags)
        given = np.zeros((len(slots), width), np.int64)
        for row, ids in zip(given, admission.given, strict=True):
            row[: len(ids)] = ids
        self._tokens[index, :width] = self._sent(given)
        drawn = np.flatnonzero(admission.numbers[:, 0] > 0)
        if len(drawn):
            count = min(int(admission.whole[drawn, 2].max()), self._noise.shape[1])
            self._noise[index[drawn], :count] = self._sent(noise_keys(admission.stream[drawn], count))

    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]]) -> Report:
        """Gathered at once; on a GPU the copy is made when it is waited for."""
        index = self.select(lanes, len(lanes))
        reported = self._reported[index]
        count = (self._length[index] - reported).clamp(max=most)
        place = torch.arange(most, device=self._device)
        columns = (reported[:, None] + place).clamp(max=self._tokens.shape[1] - 1)
        tokens = self._tokens[index].gather(1, columns).where(place < count[:, None], -1)
        flags = self._done[index] * DONE + self._broken[index] * BROKEN + (self._fault != 0) * FAULT
        self._reported[index] = reported + count
        packed = torch.cat([count[:, None], flags[:, None], tokens], dim=1)
        return Report(packed, logprobs, None, self.progress)

    def _sent(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class KernelCrossing(Crossing):
    """By kernels of ours: one copy and one launch each way."""

    def __init__(self, slots: Slots):
        super().__init__(slots)
        rows = slots.count + 1
        staged = torch.empty(_staged(rows, slots.capacity)[-1].end, dtype=torch.uint8, device=slots.device)
        self._staged, self._staging = staged, Staging(staged, self.progress)
        self._admissions: dict[tuple[int, int], tuple[Callable[[], object], list[np.ndarray]]] = {}
        size = rows * (slots.capacity + STEP + 2)
        self._news = torch.empty(size, dtype=torch.int32, device=slots.device)
        self._reports: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}
        #: Where two reports may be on their way at once, and which are.
        self._landing = [torch.empty(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(2)]
        self._landed = [torch.cuda.Event() if self._pinned else None for _ in range(2)]
        self._under_way: list[Report | None] = [None, None]

    def admit(self, slots: Sequence[int], admission: Admission) -> None:
        """Everything in one block of pinned memory, which a kernel then spreads."""
        count, width = len(slots), -(-max(map(len, admission.given)) // STEP) * STEP
        width = min(width, self._tokens.shape[1])
        array = self._staging.ready()
        if (bound := self._admissions.get((count, width))) is None:
            parts = [array[p.begin : p.end].view(p.kind).reshape(p.shape) for p in _staged(count, width)]
            bound = self._admissions[count, width] = self._bind_admission(count, width), parts
        launch, (lanes, whole, stream, numbers, given, flags) = bound
        lanes[:], whole[:], stream[:], numbers[:], flags[:] = (
            slots, admission.whole, admission.stream.view(np.int64), admission.numbers, admission.flags,
        )  # fmt: skip
        for row, ids in zip(given, admission.given, strict=True):
            row[: len(ids)] = ids
        self._staging.send(_staged(count, width)[-1].end)
        launch()

    def _bind_admission(self, count: int, width: int) -> Callable[[], object]:
        lanes, whole, stream, numbers, given, flags = (
            self._staged[p.begin : p.end].view(torch.from_numpy(np.empty(0, p.kind)).dtype).view(p.shape)
            for p in _staged(count, width)
        )
        updated = [*self._whole[:-1], *self._numbers, *self._flags, self._reported, self._tokens, self._noise]
        return _bound("admit", [lanes, whole, numbers, flags, stream, given, *updated])

    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]]) -> Report:
        """Gathered by a kernel, on its way to the host when this returns."""
        width = 2 + min(-(-most // STEP) * STEP, self._tokens.shape[1] + STEP)
        table = self.select(lanes, len(lanes))
        if (bound := self._reports.get((len(lanes), width))) is None:
            bound = self._reports[len(lanes), width] = self._bind_report(table, width)
        launch, news = bound
        launch()
        if (before := self._under_way[0]) is not None:
            before.wait()
        packed, landed = self._landing[0][: news.numel()].view(news.shape), self._landed[0]
        packed.copy_(news, non_blocking=True)
        if landed is not None:
            landed.record()
        self._under_way[0] = report = Report(packed, logprobs, landed, self.progress)
        for pair in (self._landing, self._landed, self._under_way):
            pair.reverse()
        return report

    def _bind_report(self, table: Tensor, width: int) -> tuple[Callable[[], object], Tensor]:
        news = self._news[: len(table) * width].view(len(table), width)
        read = [self._tokens, self._length, self._done, self._broken, table, self._fault]
        return _bound("report", [*read, self._reported, news]), news


def _bound(op: str, inputs: list[Tensor]) -> Callable[[], object]:
    """An op that changes some of its inputs, ready to be launched; without a GPU its reference."""
    from warpline.engine.executors.graph.bind import Bound, bind
    from warpline.kernels.catalog import find

    (launch,) = bind([Bound(find(op), inputs, [], {})])
    return launch


class _Part(NamedTuple):
    """Of a block of bytes: from where to where, and what it holds."""

    begin: int
    end: int
    kind: type[np.generic]
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _staged(count: int, width: int) -> list[_Part]:
    """How an admission of so many sequences lies in memory, the widest elements first: lanes, whole, stream, numbers,
    given (each `width` tokens), flags."""
    kinds = (np.int64, np.int64, np.int64, np.float32, np.int32, np.bool_)
    shapes = ((count,), (count, 5), (count,), (count, 4), (count, width), (count,))
    parts, at = [], 0
    for kind, shape in zip(kinds, shapes, strict=True):
        begin, at = at, at + math.prod(shape) * np.dtype(kind).itemsize
        parts.append(_Part(begin, at, kind, shape))
    return parts
