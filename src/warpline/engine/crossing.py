"""Between host and device: requests into slots, tokens out of them, each with one copy for any number of sequences.

On a GPU of ours kernels do the rest; elsewhere torch does, which also serves a GPU for which nothing can be compiled.
"""

from __future__ import annotations

import itertools
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


class Report:
    """News on their way."""

    def __init__(self, packed: Tensor, logprobs: dict[int, tuple[Tensor, ...]], landed: torch.cuda.Event | None):
        self._packed, self._logprobs, self._landed = packed, logprobs, landed

    def wait(self) -> News:
        """The one place where the host waits for the device."""
        if self._landed is not None:
            self._landed.synchronize()
        packed = self._packed.cpu().numpy()
        found = {slot: Logprobs(*(t.cpu().numpy() for t in rows)) for slot, rows in self._logprobs.items()}
        return News(packed[:, 0], packed[:, 1], packed[:, 2:], found)


class Crossing(ABC):
    """Into and out of one `Slots`."""

    def __init__(self, slots: Slots):
        self._tokens, self._noise = slots.tokens, slots.noise
        self._whole, self._numbers, self._flags, self._fault = slots.whole, slots.numbers, slots.flags, slots.fault
        self._device, self._parking, self._pinned = slots.device, slots.parking, slots.device.type == "cuda"
        self._of = slots_logprobs(slots)
        self._lanes = torch.full((-(-(slots.count + 1) // 64) * 64,), slots.parking, device=slots.device)
        self._selected: tuple[int, ...] = ()

    @abstractmethod
    def admit(self, slots: Sequence[int], admission: Admission) -> None:
        """Write the records of new sequences."""

    def select(self, lanes: Sequence[int], rows: int) -> Tensor:
        """The table lane → slot on the device, int64 [rows], always at the same address; lanes that nothing uses are
        parked."""
        chosen = tuple(lanes)
        if chosen != self._selected:
            used = max(len(chosen), len(self._selected))
            table = torch.empty(used, dtype=torch.int64, pin_memory=self._pinned)
            table.numpy()[: len(chosen)] = chosen
            table.numpy()[len(chosen) :] = self._parking
            self._lanes[:used].copy_(table, non_blocking=True)
            self._selected = chosen
        return self._lanes[:rows]

    @abstractmethod
    def report(self, lanes: Sequence[int], most: int, wanting: Sequence[int]) -> Report:
        """What these slots have got since the last report; `wanting` of them have log-probabilities."""

    def _kept_logprobs(self, wanting: Sequence[int]) -> dict[int, tuple[Tensor, ...]]:
        """Copies, because what follows goes on writing."""
        return {slot: tuple(buffer[slot].clone() for buffer in self._of()) for slot in wanting}


def slots_logprobs(slots: Slots) -> Callable[[], list[Tensor]]:
    """The buffers as they are when asked for: they may grow. Knows the slots weakly, which know the crossing."""
    import weakref

    known = weakref.ref(slots)

    def buffers() -> list[Tensor]:
        found = known()
        assert found is not None
        return [b for b in (found.logprob, found.top_logprob, found.top_token) if b is not None]

    return buffers


class TorchCrossing(Crossing):
    """By torch's operators, on any device."""

    def admit(self, slots: Sequence[int], admission: Admission) -> None:
        """A few operators for each kind of field."""
        index, width = self._sent(np.array(slots)), max(map(len, admission.given))
        self._whole[:5, index] = self._sent(admission.whole.T)
        self._whole[5, index] = self._whole[0, index]
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

    def report(self, lanes: Sequence[int], most: int, wanting: Sequence[int]) -> Report:
        """Gathered at once; on a GPU the copy is made when it is waited for."""
        index = self.select(lanes, len(lanes))
        length, reported = self._whole[0, index], self._whole[5, index]
        count = (length - reported).clamp(max=most)
        place = torch.arange(most, device=self._device)
        columns = (reported[:, None] + place).clamp(max=self._tokens.shape[1] - 1)
        tokens = self._tokens[index].gather(1, columns).where(place < count[:, None], -1)
        flags = self._flags[1, index] * DONE + self._flags[2, index] * BROKEN + (self._fault != 0) * FAULT
        self._whole[5, index] = reported + count
        packed = torch.cat([count[:, None], flags[:, None], tokens], dim=1)
        return Report(packed, self._kept_logprobs(wanting), None)

    def _sent(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class KernelCrossing(Crossing):
    """By kernels of ours: one copy and one launch each way."""

    def __init__(self, slots: Slots):
        super().__init__(slots)
        rows = slots.count + 1
        self._staged = torch.empty(rows * (73 + 4 * slots.capacity) + 64, dtype=torch.uint8, device=slots.device)
        self._news = torch.empty(rows * (slots.capacity + STEP + 2), dtype=torch.int32, device=slots.device)
        self._admissions: dict[tuple[int, int], Callable[[], object]] = {}
        self._reports: dict[tuple[int, int], tuple[Callable[[], object], Tensor]] = {}

    def admit(self, slots: Sequence[int], admission: Admission) -> None:
        """Everything in one block of pinned memory, which a kernel then spreads."""
        count, width = len(slots), -(-max(map(len, admission.given)) // STEP) * STEP
        width = min(width, self._tokens.shape[1])
        ends = _ends(count, width)
        block = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=self._pinned)
        parts = [block.numpy()[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]
        parts[0].view(np.int64)[:] = slots
        parts[1].view(np.int64)[:] = admission.whole.ravel()
        parts[2].view(np.uint64)[:] = admission.stream
        parts[3].view(np.float32)[:] = admission.numbers.ravel()
        for row, ids in zip(parts[4].view(np.int32).reshape(count, width), admission.given, strict=True):
            row[: len(ids)] = ids
        parts[5].view(np.bool_)[:] = admission.flags
        self._staged[: len(block)].copy_(block, non_blocking=True)
        if (launch := self._admissions.get((count, width))) is None:
            launch = self._admissions[count, width] = self._bind_admission(count, width)
        launch()

    def _bind_admission(self, count: int, width: int) -> Callable[[], object]:
        lanes, whole, stream, numbers, given, flags = _typed(self._staged, count, width)
        updated = [*self._whole[:5], *self._numbers, *self._flags, self._whole[5], self._tokens, self._noise]
        return _bound("admit", [lanes, whole, numbers, flags, stream, given, *updated])

    def report(self, lanes: Sequence[int], most: int, wanting: Sequence[int]) -> Report:
        """Gathered by a kernel, on its way to the host when this returns."""
        width = 2 + min(-(-most // STEP) * STEP, self._tokens.shape[1] + STEP)
        table = self.select(lanes, len(lanes))
        if (bound := self._reports.get((len(lanes), width))) is None:
            bound = self._reports[len(lanes), width] = self._bind_report(table, width)
        launch, news = bound
        launch()
        packed = torch.empty(news.shape, dtype=torch.int32, pin_memory=self._pinned)
        packed.copy_(news, non_blocking=True)
        kept, landed = self._kept_logprobs(wanting), torch.cuda.Event() if self._pinned else None
        if landed is not None:
            landed.record(torch.cuda.current_stream(self._device))
        return Report(packed, kept, landed)

    def _bind_report(self, table: Tensor, width: int) -> tuple[Callable[[], object], Tensor]:
        news = self._news[: len(table) * width].view(len(table), width)
        read = [self._tokens, self._whole[0], self._flags[1], self._flags[2], table, self._fault]
        return _bound("report", [*read, self._whole[5], news]), news


def _bound(op: str, inputs: list[Tensor]) -> Callable[[], object]:
    """An op that changes some of its inputs, ready to be launched; without a GPU its reference."""
    from warpline.engine.executors.graph.bind import Bound, bind
    from warpline.kernels.catalog import find

    (launch,) = bind([Bound(find(op), inputs, [], {})])
    return launch


def _ends(count: int, width: int) -> list[int]:
    """Where in bytes what is staged ends, the widest elements first: lanes, whole, stream, numbers, given, flags."""
    return list(itertools.accumulate((8 * count, 40 * count, 8 * count, 16 * count, 4 * count * width, count)))


def _typed(block: Tensor, count: int, width: int) -> list[Tensor]:
    kinds = (torch.int64, torch.int64, torch.int64, torch.float32, torch.int32, torch.bool)
    shapes = ((count,), (count, 5), (count,), (count, 4), (count, width), (count,))
    ends = _ends(count, width)
    sized = zip((0, *ends), ends, kinds, shapes, strict=False)
    return [block[begin:end].view(kind).view(shape) for begin, end, kind, shape in sized]
