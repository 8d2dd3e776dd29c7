"""From the engine's thread to the event loop: one call between threads for all that a turn brings, and none while one
is on its way.

The first chunk of a sequence and its end are handed over at once. What comes in between waits until `MERGE` seconds
have passed since the last was handed over, so that a stream's tokens are merged by time however fast they come. Where
there are so many streams that sending takes long, the wait is longer too: requests that arrive need the loop as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Protocol

#: Seconds for which tokens of a stream are gathered into one event.
MERGE = 0.0015
#: The loop rests from sending at least this many times as long as it took.
REST = 2.0


class Listener(Protocol):
    """Whatever has news from the engine: `waiting` is the hub's own note that it knows."""

    waiting: bool

    def arrived(self) -> None:
        """There is something new; called in the event loop."""


class Hub:
    """One for an event loop. `tell` and `wake` are called by any thread, everything else by the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, merge: float = MERGE):
        self._loop, self._merge = loop, merge
        self._urgent: deque[Listener] = deque()
        self._later: deque[Listener] = deque()
        self._called = False  # a call into the loop is on its way
        self._resting = False  # something was handed over a moment ago, and a timer will look again

    def tell(self, listener: Listener, *, urgent: bool) -> None:
        """It has news, which the loop hears of when it is woken."""
        if urgent:
            self._urgent.append(listener)
        elif not listener.waiting:
            listener.waiting = True
            self._later.append(listener)

    def wake(self) -> None:
        """All is told for now. Each call costs the thread some 10 µs, so there is one for a whole turn."""
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
        self._loop.call_soon(self._sent, began)  # it comes behind those that have just been woken

    def _sent(self, began: float) -> None:
        self._loop.call_later(max(self._merge, REST * (time.perf_counter() - began)), self._look)

    def _look(self) -> None:
        if not self._later:
            self._resting = False
            if not self._later:  # asked again, because a thread may have seen the rest and left it to us
                return
            self._resting = True
        self._hand_over_later()


def _empty(news: deque[Listener]) -> None:
    while news:
        listener = news.popleft()
        listener.waiting = False  # before it looks: what comes from now on is told again
        listener.arrived()
