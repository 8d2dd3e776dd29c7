"""What turns take, and the stream that all engines share."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch


class Clock:
    """A turn from its first launch to its last token, as the host sees it. Only where prompts and steps share a turn on
    a GPU its own clock has to tell them apart: every question to the driver delays the next launch."""

    def __init__(self, *, cuda: bool, prompts: bool, steps: bool):
        self._begun, self._prompts = time.perf_counter(), prompts
        self._both, self._cuda, self._steps = prompts and steps, cuda, steps
        self._marks: list[Any] = []
        self._ended = 0.0

    def mark(self) -> None:
        """Prompts are done, and again: steps are."""
        if self._both:
            self._marks.append(self._event() if self._cuda else time.perf_counter())

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def landed(self) -> None:
        """The host knows the tokens."""
        self._ended = time.perf_counter()

    @property
    def ended(self) -> float:
        """When the host had its tokens."""
        return self._ended

    def seconds(self) -> tuple[float, float]:
        """Of prompts and of steps."""
        whole = self._ended - self._begun
        if not self._both:
            return (whole, 0.0) if self._prompts else (0.0, whole)
        first, last = self._marks
        steps = first.elapsed_time(last) / 1e3 if self._cuda else last - first
        return whole - steps, steps


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_STREAMS_LOCK = threading.Lock()


def shared_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a process on a GPU: their launches follow one another, since a persistent launch needs the
    whole GPU, and nothing that torch does on its own stream waits for them."""
    with _STREAMS_LOCK:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)
        return _STREAMS[device]
