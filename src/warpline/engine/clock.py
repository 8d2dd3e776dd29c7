"""When turns begin and end, on the device's own clock where it has one, and the stream that all engines share."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch


class Clock:
    """When a turn began, had its prompts and ended: on the device's own clock where it has one."""

    def __init__(self, cuda: bool, before: Clock | None, spare: list[Any]):
        """`spare` keeps events to be used again: making one takes the host longer than all else here."""
        self._cuda, self._before, self._spare = cuda, before, spare
        self._at: list[Any] = []  # events, or seconds
        self._note()

    def _note(self) -> None:
        if not self._cuda:
            self._at.append(time.perf_counter())
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._at.append(event)

    prefilled = ended = _note

    def seconds(self) -> tuple[float, float, float]:
        """Of prompts, of steps, and between the turn before and this one; once it has ended."""
        begun, prefilled, *ended = self._at
        idle = 0.0
        if self._before is not None:
            idle = self._between(self._before._at[-1], begun)
            self._before._free()
            self._before = None
        return self._between(begun, prefilled), self._between(prefilled, ended[0]) if ended else 0.0, idle

    def _between(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3 if self._cuda else last - first

    def _free(self) -> None:
        if self._cuda:
            self._spare.extend(self._at)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_STREAMS_LOCK = threading.Lock()


def shared_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a process on a GPU: their launches follow one another, since a persistent launch needs the
    whole GPU, and nothing that torch does on its own stream waits for them."""
    with _STREAMS_LOCK:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)
        return _STREAMS[device]
