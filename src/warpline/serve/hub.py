"""Passes news from the engine's thread to the event loop: one call between threads for all that a turn brings, and
none while one is pending.

The first chunk of a sequence and its end are passed on at once. Tokens in between wait until `MERGE` seconds after the
last handover, so that a stream's tokens are merged by time, however fast they come. Where there are so many streams
that sending takes long, the wait is longer too, because new requests need the loop as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Protocol

#: Seconds for which tokens of a stream are gathered into one event.
MERGE = 0.0015
#: After sending, the loop pauses it for at least this many times as long as it took.
REST = 2.0


class Listener(Protocol):
    """Receives news from the engine; `waiting` is the hub's own mark that the listener is queued."""

    waiting: bool

    def arrived(self) -> None:
        """Called in the event loop when there is something new."""


class Hub:
    """One for each event loop. `tell` and `wake` may be called by any thread, everything else by the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, merge: float = MERGE):
        self._loop, self._merge = loop, merge
        self._urgent: deque[Listener] = deque()
        self._later: deque[Listener] = deque()
        self._called = False  # a call into the loop is pending
        self._resting = False  # sending pauses, and a timer will look at the queue

    def tell(self, listener: Listener, *, urgent: bool) -> None:
        """Queue a listener with news; the loop learns of it at `wake`."""
        if urgent:
            self._urgent.append(listener)
        elif not listener.waiting:
            listener.waiting = True
            self._later.append(listener)

    def wake(self) -> None:
        """Call the loop if there is news. Each call costs the thread some 10 µs, so there is one for a whole turn."""
        if self._called or not (self._urgent or (self._later and not self._resting)):
            return
        self._called = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing listens any more
            self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        self._called = False
        _empty(self._urgent)
        if self._later and not self._resting:
            self._resting = True
            self._hand_over_later()

    def _hand_over_later(self) -> None:
        began = time.perf_counter()
        _empty(self._later)
        self._loop.call_soon(self._sent, began)  # runs after the listeners that were just woken

    def _sent(self, began: float) -> None:
        self._loop.call_later(max(self._merge, REST * (time.perf_counter() - began)), self._look)

    def _look(self) -> None:
        if not self._later:
            self._resting = False
            if not self._later:  # checked again: a thread may have seen the pause and left its news to this timer
                return
            self._resting = True
        self._hand_over_later()


def _empty(news: deque[Listener]) -> None:
    while news:
        listener = news.popleft()
        listener.waiting = False  # before it looks: later news is queued again
        listener.arrived()
