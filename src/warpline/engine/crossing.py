"""Transfers between host and device: requests into slots, tokens out of them, for any number of sequences at once.

On a GPU our kernels read and write pinned memory of the host, so that each direction is one launch. Where nothing can
be compiled torch does it, and on a CPU numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from warpline.engine.admission import Admission
from warpline.engine.request import Request
from warpline.kernels.driver import upload
from warpline.kernels.noise import noise_keys

if TYPE_CHECKING:
    from warpline.engine.slots import Slots

DONE, NOT_FINITE, FAULT = 1, 2, 4


class Logprobs(NamedTuple):
    """Log-probabilities of a slot, by position."""

    logprob: np.ndarray  # [capacity]
    top_logprob: np.ndarray  # [capacity, K]
    top_token: np.ndarray


class News(NamedTuple):
    """What lanes have got since the last report."""

    counts: np.ndarray  # [n]: new tokens
    flags: np.ndarray  # [n]: DONE, NOT_FINITE, FAULT
    tokens: np.ndarray  # [n, most]: the first `counts` of each row
    logprobs: dict[int, Logprobs]  # of slots that want them


class Progress:
    """Counts launches that read the host's memory, and those known to have ended: all that were enqueued before a
    report that has arrived. So an ordinary turn does not ask the driver."""

    def __init__(self) -> None:
        self.enqueued = self.ended = 0


class Report:
    """News in transfer. `read` waits for them and returns one row per lane: count, flags, tokens."""

    def __init__(
        self, read: Callable[[], np.ndarray], logprobs: dict[int, tuple[Tensor, ...]], progress: Progress | None = None
    ):
        self._read, self._logprobs = read, logprobs
        self._progress, self._behind = progress, 0 if progress is None else progress.enqueued
        self._news: News | None = None

    def wait(self) -> News:
        """Wait until the device has written the news, and return them."""
        if self._news is None:
            rows = self._read()
            if self._progress is not None:
                self._progress.ended = max(self._progress.ended, self._behind)
            found = {slot: Logprobs(*(t.cpu().numpy() for t in held)) for slot, held in self._logprobs.items()}
            self._news = News(rows[:, 0], rows[:, 1], rows[:, 2:], found)
        return self._news


class Staging:
    """Host memory that launches read later. Contract: it is written only after `wait`, when the last such launch has
    ended."""

    def __init__(self, progress: Progress, device: torch.device):
        self._progress, self._device, self._last = progress, device, 0

    def wait(self) -> None:
        """Wait until the memory may be written."""
        if self._last > self._progress.ended and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def used(self) -> None:
        """Note that a launch that reads the memory was enqueued."""
        self._progress.enqueued += 1
        self._last = self._progress.enqueued


class Table(Staging):
    """A tensor on the device, and the host memory that is copied to it."""

    def __init__(self, target: Tensor, progress: Progress):
        super().__init__(progress, target.device)
        self._target, self._cuda = target, target.is_cuda
        self._here = torch.zeros(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
        #: Contract: written only after `wait`.
        self.array = self._here.numpy()

    def send(self) -> None:
        """Enqueue the copy to the device."""
        if self._cuda:
            upload(self._target, self._here)
        else:
            self._target.copy_(self._here)


class Crossing(ABC):
    """Transfers into and out of one `Slots`."""

    def __init__(self, slots: Slots):
        self._tokens, self._noise, self._fault = slots.tokens, slots.noise, slots.fault
        self._integers, self._floats, self._flags = slots.integers, slots.floats, slots.flags
        self._bias, self._counts = slots.bias, slots.counts
        self._length, self._reported = slots.length, slots.reported
        self._done, self._not_finite = slots.done, slots.not_finite
        self._device, self._parking, self._vocab = slots.device, slots.parking, slots.config.vocab_size
        self._pinned, self._rows = slots.device.type == "cuda", slots.count + 1
        self.progress = Progress()
        self._admission = Admission(self._rows, slots.capacity, pinned=self._pinned)
        self._lanes = torch.full((-(-self._rows // 64) * 64,), slots.parking, device=slots.device)
        self._tables = [Table(self._lanes, self.progress) for _ in range(2)]  # a turn may select twice
        self._selected: tuple[int, ...] = ()
        self._parts: dict[int, Tensor] = {}

    def stage(self, requests: Sequence[Request]) -> None:
        """Write the fields of the requests to be admitted next. If one cannot be admitted this raises, and nothing
        changes."""
        self._admission.fill(requests, self._vocab)

    def admit(self, slots: Sequence[int]) -> None:
        """Write the records of the staged requests into these slots."""
        self._admission.lanes[: len(slots)] = slots
        self._admit(slots, self._admission)

    @abstractmethod
    def _admit(self, slots: Sequence[int], admission: Admission) -> None: ...

    def select(self, lanes: Sequence[int], rows: int) -> Tensor:
        """Return the table lane → slot on the device, int64 [rows], always at the same address; unused lanes point to
        the parking slot."""
        chosen = tuple(lanes)
        if chosen != self._selected:
            self._tables.reverse()
            table = self._tables[0]
            table.wait()
            table.array[: len(chosen)], table.array[len(chosen) :] = chosen, self._parking
            self._selected = ()  # unknown until it has been sent
            table.send()
            table.used()
            self._selected = chosen
        if (part := self._parts.get(rows)) is None:
            part = self._parts[rows] = self._lanes[:rows]
        return part

    @abstractmethod
    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]], *, last: bool) -> Report:
        """Report what these slots have got since the last report: at most `most` tokens each, as the caller guarantees.

        `logprobs` is passed through. Nothing that takes long may be enqueued behind the `last` report of a turn."""


class HostCrossing(Crossing):
    """For slots in the host's memory: by numpy, which is faster there than torch."""

    def _admit(self, slots: Sequence[int], admission: Admission) -> None:
        n, integers, floats, flags = len(slots), self._integers.numpy(), self._floats.numpy(), self._flags.numpy()
        brought = admission.integers[:n].T
        integers[:-1, slots], integers[-1, slots] = brought[:5], brought[0]
        floats[:, slots] = admission.floats[:n].T
        flags[:2, slots], flags[2:, slots] = admission.flags[:n].T, False
        tokens, noise = self._tokens.numpy(), self._noise.numpy()
        for slot, ids in zip(slots, admission.tokens(), strict=True):
            tokens[slot, : len(ids)] = ids
        bias, counts = self._bias.numpy(), self._counts.numpy()
        for which, chosen, added in admission.adjusted():
            bias[slots[which]] = counts[slots[which]] = 0
            bias[slots[which], chosen] = added
        drawn = np.flatnonzero(admission.floats[:n, 0] > 0)
        if len(drawn):
            count = min(int(brought[2, drawn].max()), noise.shape[1])
            noise[np.array(slots)[drawn], :count] = noise_keys(admission.stream[drawn].view(np.uint64), count)

    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]], *, last: bool) -> Report:
        """Return a report that is complete already."""
        index, tokens, known = list(lanes), self._tokens.numpy(), self._reported.numpy()
        reported = known[index]
        count = np.minimum(self._length.numpy()[index] - reported, most)
        known[index] = reported + count
        packed = np.full((len(index), 2 + most), -1, np.int64)
        packed[:, 0] = count
        packed[:, 1] = self._done.numpy()[index] * DONE + self._not_finite.numpy()[index] * NOT_FINITE
        for row, slot, first, n in zip(packed, index, reported.tolist(), count.tolist(), strict=True):
            row[2 : 2 + n] = tokens[slot, first : first + n]
        return Report(lambda: packed, logprobs)


class TorchCrossing(Crossing):
    """By torch's operators, for a GPU on which our kernels do not run."""

    def _admit(self, slots: Sequence[int], admission: Admission) -> None:
        """A few operators for each kind of field."""
        n, given = len(slots), admission.tokens()
        index, width = self._sent(np.array(slots)), max(map(len, given))
        self._integers[:-1, index] = self._sent(admission.integers[:n, :5].T)
        self._reported[index] = self._length[index]
        self._floats[:, index] = self._sent(admission.floats[:n].T)
        self._flags[:, index] = False
        self._flags[:2, index] = self._sent(admission.flags[:n].T)
        for which, chosen, added in admission.adjusted():
            slot = slots[which]
            self._bias[slot], self._counts[slot] = 0, 0
            self._bias[slot, self._sent(chosen).long()] = self._sent(added)
        padded = np.zeros((n, width), np.int64)
        for row, ids in zip(padded, given, strict=True):
            row[: len(ids)] = ids
        self._tokens[index, :width] = self._sent(padded)
        drawn = np.flatnonzero(admission.floats[:n, 0] > 0)
        if len(drawn):
            count = min(int(admission.integers[drawn, 2].max()), self._noise.shape[1])
            self._noise[index[drawn], :count] = self._sent(noise_keys(admission.stream[drawn].view(np.uint64), count))

    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]], *, last: bool) -> Report:
        """Gather the news at once; on a GPU they are copied when the report is waited for."""
        index = self.select(lanes, len(lanes))
        reported = self._reported[index]
        count = (self._length[index] - reported).clamp(max=most)
        place = torch.arange(most, device=self._device)
        columns = (reported[:, None] + place).clamp(max=self._tokens.shape[1] - 1)
        tokens = self._tokens[index].gather(1, columns).where(place < count[:, None], -1)
        flags = self._done[index] * DONE + self._not_finite[index] * NOT_FINITE + (self._fault != 0) * FAULT
        self._reported[index] = reported + count
        packed = torch.cat([count[:, None], flags[:, None], tokens], dim=1)
        return Report(lambda: packed.cpu().numpy(), logprobs, self.progress)

    def _sent(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(self._device)


class KernelCrossing(Crossing):
    """By our kernels, bound once for up to all slots; they read and write the host's memory."""

    def __init__(self, slots: Slots):
        super().__init__(slots)
        self._staging = Staging(self.progress, slots.device)
        #: Two turns may be in flight, with two reports each.
        self._landings = deque(_Landing(self._rows, slots.capacity, pinned=self._pinned) for _ in range(4))
        self._launch: Callable[[], object] | None = None

    def stage(self, requests: Sequence[Request]) -> None:
        """Write them into pinned memory, after the last launch of `admit` has read it."""
        self._staging.wait()
        super().stage(requests)

    def _admit(self, slots: Sequence[int], admission: Admission) -> None:
        if self._launch is None:
            records = [*self._integers[:-1], *self._floats, *self._flags, self._reported]
            tables = [self._bias, self._counts, self._tokens, self._noise]
            self._launch = _bound("admit", [*admission.tensors, *records, *tables])
        self._launch()
        self._staging.used()

    def report(self, lanes: Sequence[int], most: int, logprobs: dict[int, tuple[Tensor, ...]], *, last: bool) -> Report:
        """Enqueue the report; the kernel writes it into the host's memory."""
        self._landings.rotate()
        landing = self._landings[0]
        if landing.report is not None:
            landing.report.wait()
        if landing.launch is None:
            read = [self._tokens, self._length, self._done, self._not_finite, landing.lanes, self._fault]
            landing.launch = _bound("report", [*read, self._reported, landing.news])
        landing.select(lanes)
        landing.launch()
        self.progress.enqueued += 1
        landing.report = Report(partial(landing.read, self._passed(last), len(lanes), most), logprobs, self.progress)
        return landing.report

    def _passed(self, last: bool) -> Any:
        """Return what to wait for. Recording an event takes the host five times as long as using the stream, which
        serves as well if nothing is enqueued behind."""
        if not self._pinned:
            return None
        stream = torch.cuda.current_stream(self._device)
        return stream if last else stream.record_event()


class _Landing:
    """Pinned memory for one report, and the lanes that it is for."""

    def __init__(self, rows: int, capacity: int, *, pinned: bool):
        self.lanes = torch.full((rows,), -1, pin_memory=pinned)
        self.news = torch.zeros(rows, capacity + 2, dtype=torch.int32, pin_memory=pinned)
        self._lanes, self._news, self._count = self.lanes.numpy(), self.news.numpy(), 0
        self.launch: Callable[[], object] | None = None
        self.report: Report | None = None

    def select(self, lanes: Sequence[int]) -> None:
        """Set the slots of the next report."""
        self._lanes[: len(lanes)], self._lanes[len(lanes) : self._count] = lanes, -1
        self._count = len(lanes)

    def read(self, passed: Any, count: int, most: int) -> np.ndarray:
        """Wait for the report and return its rows."""
        if passed is not None:
            passed.synchronize()
        return self._news[:count, : 2 + most].copy()  # a copy: the memory is used again


def _bound(op: str, inputs: list[Tensor]) -> Callable[[], object]:
    """Return a function that launches an op which updates some inputs; without a GPU, its reference."""
    from warpline.engine.executors.graph.bind import Bound, bind
    from warpline.kernels.catalog import find

    (made,) = bind([Bound(find(op), inputs, [], {})])
    return made
