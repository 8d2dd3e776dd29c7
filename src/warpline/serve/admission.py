"""Limits the sequences in progress: each takes a place when it is requested, and returns it once."""

from __future__ import annotations

import time
from collections import deque

from warpline.serve.errors import ApiError, bad

#: The pace is measured over this many of the last sequences; it determines the Retry-After of refused clients.
REMEMBERED = 64


class Admission:
    """Places for running and waiting sequences. Only the event loop calls it, so that check and take are atomic."""

    def __init__(self, slots: int, queue: int):
        self.slots, self.places = slots, slots + queue
        self.taken = 0
        self.refused = 0
        self._ended: deque[float] = deque(maxlen=REMEMBERED)

    def take(self, count: int) -> None:
        """Take places for all sequences of a request; raise 429 if there are not enough."""
        if count > self.places:
            raise bad(f"the request asks for {count:,} sequences, and at most {self.places:,} fit: split it")
        if self.taken + count > self.places:
            self.refused += 1
            after = self._patience()
            raise ApiError(
                429, f"the server is full ({self.taken:,} sequences): try again in {after} s", retry_after=after,
                code="overloaded",
            )  # fmt: skip
        self.taken += count

    def give_back(self, count: int) -> None:
        """Return the places of `count` sequences that have ended."""
        self.taken -= count
        now = time.monotonic()
        self._ended.extend([now] * min(count, REMEMBERED))

    def _patience(self) -> int:
        """Return the seconds until half of the queue will have begun, at the present pace."""
        if len(self._ended) < 2:
            return 1
        pace = len(self._ended) / max(time.monotonic() - self._ended[0], 1e-3)
        return round(min(60, max(1, (self.places - self.slots) / 2 / pace)))
