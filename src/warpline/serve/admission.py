"""How much may be under way: a place for each sequence, taken when it is asked for and given back once."""

from __future__ import annotations

import time
from collections import deque

from warpline.serve.errors import ApiError, bad

#: Of so many of the last sequences the pace is known, from which clients are told when to come again.
REMEMBERED = 64


class Admission:
    """Places for what runs and for what waits. The event loop alone calls it, so a check and its place are one."""

    def __init__(self, slots: int, queue: int):
        self.slots, self.places = slots, slots + queue
        self.taken = 0
        self.refused = 0
        self._ended: deque[float] = deque(maxlen=REMEMBERED)

    def take(self, count: int) -> None:
        """Places for the sequences of a request, all or none."""
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
        """These have ended."""
        self.taken -= count
        now = time.monotonic()
        self._ended.extend([now] * min(count, REMEMBERED))

    def _patience(self) -> int:
        """Seconds until half of what waits will have begun, at the present pace."""
        if len(self._ended) < 2:
            return 1
        pace = len(self._ended) / max(time.monotonic() - self._ended[0], 1e-3)
        return round(min(60, max(1, (self.places - self.slots) / 2 / pace)))
