"""Threads for compiled code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from warpline import hardware


class Team:
    """Threads that run the same function at the same time, each with its number; the caller is number 0. During a run
    each has its own CPU: Linux may otherwise leave two on one for many runs, if another thread was busy before."""

    def __init__(self, size: int):
        self.size = size
        self._work: list[SimpleQueue[Callable[[int], Any] | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._allowed: set[int] = set()  # CPUs for members of this run; empty if the system chooses
        self._taken: set[int] = set()  # by members that have begun
        self._settling = threading.Lock()
        for number, work in enumerate(self._work, 1):
            threading.Thread(target=self._serve, args=(number, work), daemon=True).start()

    def _serve(self, number: int, work: SimpleQueue[Callable[[int], Any] | None]) -> None:
        while (task := work.get()) is not None:
            try:
                self._settle()
                task(number)
                self._ended.put(None)
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._ended.put(error)

    def run(self, task: Callable[[int], Any]) -> Any:
        """Run `task` on all threads; return the result of number 0 when all have ended. An error of any thread is
        raised."""
        allowed, here = hardware.allowed_cpus(), hardware.current_cpu()
        is_held = here in allowed and 1 < self.size <= len(allowed) and hardware.restrict_to({here})
        self._allowed, self._taken = allowed if is_held else set(), {here}
        try:
            for work in self._work:
                work.put(task)
            result = task(0)
            for error in [self._ended.get() for _ in self._work]:
                if error is not None:
                    raise error
            return result
        finally:
            if is_held:  # the caller's thread does not belong to the team
                hardware.restrict_to(allowed)

    def _settle(self) -> None:
        """Restrict this thread to CPUs that no other member uses."""
        if self._allowed:
            with self._settling:
                hardware.restrict_to(self._allowed - self._taken)
                self._taken.add(hardware.current_cpu())

    def close(self) -> None:
        """End the threads."""
        for work in self._work:
            work.put(None)
