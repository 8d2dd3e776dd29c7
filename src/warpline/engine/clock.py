"""What turns take, and the stream that all engines share."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Drafted(NamedTuple):
    """Of steps with drafts."""

    steps: int  # passes
    lane_steps: int  # sequences of every pass, added up
    drafted: int  # tokens that were run as further rows of a pass
    accepted: int  # of these, tokens that were right


@dataclass(slots=True)
class Stats:
    """What an engine has done so far."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    lane_steps: int = 0  # sequences of every step, added up
    drafted: int = 0  # tokens that were run as further rows of a step
    accepted: int = 0  # of these, tokens that were right
    busy_seconds: float = 0.0  # from the launch of a turn until its tokens are known
    idle_seconds: float = 0.0  # between turns, when the device has nothing to do


class Clock:
    """Turns, one after the other, each from its first launch to its last token as the host sees it. A GPU's own clock
    is asked only where prompts and steps share a turn, or where a reader may keep the host from looking in time: every
    question to the driver delays the next launch."""

    def __init__(self, *, cuda: bool):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if cuda else []
        self.ended = 0.0  # when the host had the tokens

    def begin(self, *, prompts: bool, steps: bool, followed: bool) -> None:
        """A turn of prompts, steps or both."""
        self._prompts, self._both = prompts, prompts and steps
        self._whole = bool(self._events) and followed
        self._last = 2 if steps else 1
        self._prompted = self._begun = time.perf_counter()
        if self._whole:
            self._events[0].record()

    def prompted(self) -> None:
        """Prompts are enqueued, or done where the host computes."""
        self._prompted = time.perf_counter()
        if self._whole or (self._both and self._events):
            self._events[1].record()

    def stepped(self) -> None:
        """Steps are enqueued."""
        if self._whole or (self._both and self._events):
            self._events[2].record()

    def landed(self) -> None:
        """The host knows the tokens."""
        self.ended = time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Of prompts and of steps."""
        whole = self._between(0, self._last) if self._whole else self.ended - self._begun
        if not self._both:
            return (whole, 0.0) if self._prompts else (0.0, whole)
        steps = self._between(1, 2) if self._events else self.ended - self._prompted
        return max(0.0, whole - steps), steps

    def _between(self, first: int, last: int) -> float:
        return float(self._events[first].elapsed_time(self._events[last])) / 1e3


class OnStream:
    """While it is open, torch enqueues on a stream: what `torch.cuda.stream` does, in half of the time."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.cuda.current_device()
        self._before = torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)
        torch.cuda.set_device(self._device)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_STREAMS_LOCK = threading.Lock()


def shared_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a process on a GPU: their launches follow one another, since a persistent launch needs the
    whole GPU, and nothing that torch does on its own stream waits for them."""
    with _STREAMS_LOCK:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)
        return _STREAMS[device]
