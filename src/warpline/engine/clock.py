"""What turns take, and the stream that all engines share."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch


class Clock:
    """A turn from its first launch to its last token, as the host sees it. A GPU's own clock is asked only where
    prompts and steps share a turn, or where a reader may keep the host from looking in time: every question to the
    driver delays the next launch."""

    def __init__(self, *, cuda: bool, prompts: bool, steps: bool, followed: bool):
        self._prompts, self._both = prompts, prompts and steps
        self._events = cuda and (self._both or followed)
        self._marks: list[Any] = []
        self.ended = 0.0  # when the host had its tokens
        self.mark()

    def mark(self) -> None:
        """It begins; prompts are done; steps are."""
        if not self._events:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def landed(self) -> None:
        """The host knows the tokens."""
        self.ended = time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Of prompts and of steps."""
        begun, prompted, *stepped = self._marks
        last = stepped[0] if stepped else prompted
        if self._events:
            return _between(begun, prompted), _between(prompted, last)
        if self._both:  # on a CPU, which computes on the way
            return prompted - begun, self.ended - prompted
        whole = self.ended - begun
        return (whole, 0.0) if self._prompts else (0.0, whole)


def _between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    return float(first.elapsed_time(last)) / 1e3


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_STREAMS_LOCK = threading.Lock()


def shared_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a process on a GPU: their launches follow one another, since a persistent launch needs the
    whole GPU, and nothing that torch does on its own stream waits for them."""
    with _STREAMS_LOCK:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)
        return _STREAMS[device]
