"""How generations are timed: warm-up, then repetitions of all methods in turn, each synchronised at both ends.

Machines drift: clocks, neighbours, temperature. Methods measured in turn share the drift, so that their ratios hold;
absolute times are only comparable within one run. A program with one method neither finds the CPU's caches full of
another's code and data nor shares its cores with another's threads, which spin long after a call has ended (ONNX
Runtime's for 32 ms, torch's for 10). So a turn begins when these threads sleep, and a short call is made twice in it
and timed the second time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

#: Seconds of a call beyond which cold caches do not matter.
SHORT = 0.1
#: Seconds to wait for other methods' threads at most, seconds of one look at them, and idle looks in a row to stop at.
PATIENCE, LOOK, LOOKS = 0.5, 0.002, 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of some repetitions."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the repetitions, in seconds."""
        return statistics.median(self.seconds)

    @property
    def mean(self) -> float:
        """Mean of the repetitions, in seconds."""
        return statistics.fmean(self.seconds)

    @property
    def sigma(self) -> float:
        """Standard deviation of one repetition in seconds; 0 where there is only one."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0

    def percentile(self, share: float) -> float:
        """Return the repetition below which this share (0 to 1) of all lies."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def figures(self) -> dict[str, float]:
        """Return the figures of a row: median, percentiles, mean and sigma in seconds, and the count."""
        return {
            "seconds": round(self.median, 7),
            "seconds_p20": round(self.percentile(0.2), 7),
            "seconds_p80": round(self.percentile(0.8), 7),
            "seconds_mean": round(self.mean, 7),
            "seconds_sigma": round(self.sigma, 7),
            "repetitions": len(self.seconds),
        }


def timed_result(call: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Return the wall-clock seconds of one call, with the device idle before and after, and its result."""
    _synchronise(device)
    start = time.perf_counter()
    result = call()
    _synchronise(device)
    return time.perf_counter() - start, result


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of one call, without its result."""
    return timed_result(call, device)[0]


def interleave(
    calls: Mapping[str, Callable[[], object] | Sequence[Callable[[], object]]],
    device: torch.device,
    *,
    repetitions: int,
    budget_seconds: float,
    least: int = 3,
) -> Iterator[tuple[str, float]]:
    """Yield (name, seconds) of every call in turn, `least` to `repetitions` times: beyond the least, each has an equal
    part of the budget, so that the slow ones drop out first. Several calls under one name run one after the other, so
    that both times of their difference come from the same moment.

    Every other round goes backwards, so that no method always runs after the same neighbour.
    """
    part = budget_seconds / max(1, len(calls))
    taken = dict.fromkeys(calls, 0.0)
    last: dict[tuple[str, int], float] = {}
    for turn in range(repetitions):
        names = [name for name in calls if turn < least or taken[name] < part]
        for name in names[:: 1 if turn % 2 == 0 else -1]:
            _wait_for_threads()
            given = calls[name]
            for i, call in enumerate([given] if callable(given) else given):
                if last.get((name, i), SHORT) < SHORT:
                    call()
                last[name, i] = timed(call, device)
                taken[name] += last[name, i]
                yield name, last[name, i]


def _wait_for_threads() -> None:
    """Wait until this process takes less than a quarter of a core, or PATIENCE seconds."""
    deadline, idle = time.monotonic() + PATIENCE, 0
    while idle < LOOKS and time.monotonic() < deadline:
        begun, taken = time.monotonic(), time.process_time()
        time.sleep(LOOK)
        is_idle = time.process_time() - taken < (time.monotonic() - begun) / 4
        idle = idle + 1 if is_idle else 0


def collect(pairs: Iterable[tuple[str, float]]) -> dict[str, Sample]:
    """Return the samples by name."""
    ordered = sorted(pairs, key=lambda pair: pair[0])
    return {n: Sample(tuple(s for _, s in group)) for n, group in itertools.groupby(ordered, key=lambda pair: pair[0])}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
