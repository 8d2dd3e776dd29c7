"""Time and counts of engine turns, and the CUDA stream that all engines share."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Drafted(NamedTuple):
    """Counts of steps that may have run drafts."""

    steps: int  # passes
    lane_steps: int  # sequences per pass, summed over the passes
    drafted: int  # draft tokens that were run as additional rows of a pass
    accepted: int  # of these, tokens that were right


@dataclass(slots=True)
class Stats:
    """What an engine has done so far."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    lane_steps: int = 0  # sequences per step, summed over the steps
    drafted: int = 0  # draft tokens that were run as additional rows of a step
    accepted: int = 0  # of these, tokens that were right
    busy_seconds: float = 0.0  # from the launch of a turn until its tokens are known
    idle_seconds: float = 0.0  # between turns, when the device has nothing to do


class Clock:
    """Measures engine turns, each from its first launch until the host has its last token. CUDA events are used only
    where prompts and steps share a turn, or where a reader may delay the host: every driver call delays the next
    launch."""

    def __init__(self, *, cuda: bool):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if cuda else []
        self.ended = 0.0  # when the host had the tokens

    def begin(self, *, prompts: bool, steps: bool, followed: bool) -> None:
        """Begin a turn with prompts, steps or both; `followed` if a reader waits for its tokens."""
        self._prompts, self._both = prompts, prompts and steps
        self._whole = bool(self._events) and followed
        self._last = 2 if steps else 1
        self._prompted = self._begun = time.perf_counter()
        if self._whole:
            self._events[0].record()

    def prompted(self) -> None:
        """Note that prompts have been enqueued (GPU) or computed (CPU)."""
        self._prompted = time.perf_counter()
        if self._whole or (self._both and self._events):
            self._events[1].record()

    def stepped(self) -> None:
        """Note that the steps have been enqueued."""
        if self._whole or (self._both and self._events):
            self._events[2].record()

    def landed(self) -> None:
        """Note that the host knows the tokens."""
        self.ended = time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of prompts and of steps."""
        whole = self._between(0, self._last) if self._whole else self.ended - self._begun
        if not self._both:
            return (whole, 0.0) if self._prompts else (0.0, whole)
        steps = self._between(1, 2) if self._events else self.ended - self._prompted
        return max(0.0, whole - steps), steps

    def _between(self, first: int, last: int) -> float:
        return float(self._events[first].elapsed_time(self._events[last])) / 1e3


class OnStream:
    """While it is open, torch enqueues on a stream, like `torch.cuda.stream` in half of the time."""

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
    """Return the stream that all engines of the process use on this GPU.

    Their launches run one after another, because a persistent launch needs the whole GPU. Work on torch's own stream
    does not wait for them."""
    with _STREAMS_LOCK:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device)
        return _STREAMS[device]
