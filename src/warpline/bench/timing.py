"""How kernels are timed: graph replays over rotating buffers, so that neither launch gaps nor a warm L2 mislead."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Launches captured in one graph, and graph replays that are timed one by one.
LAUNCHES, REPLAYS = 20, 15
#: In `time_in_turn`: a way that takes HOPELESS times as long as the best after LOOK replays is given up.
LOOK, HOPELESS = 4, 1.3
#: Microseconds that a graph should take: fewer long launches are captured.
ENOUGH = 1000.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per launch."""

    median: float
    p20: float
    p80: float


def time_launches(launch: Callable[[int], object], sets: int, launches: int = LAUNCHES) -> Timing:
    """Time `launch(i)`, which uses buffer set i of `sets`; the sets together must exceed the L2 cache. Its result is
    kept until the set is used again: if it were freed at once, its memory would be reused and stay in the cache."""
    count = max(launches, sets)
    _warm_up(launch, sets)
    graph = _captured(launch, sets, count)
    for _ in range(3):
        graph.replay()
    return _timing(_replays([graph], REPLAYS, count)[0])


def time_in_turn(ways: Sequence[Callable[[int], object]], sets: int) -> list[Timing]:
    """Time several ways to compute the same, like `time_launches` but replaying their graphs in turn, so that drifting
    clocks affect all alike. A way far slower than the best is given up early, but never the first, the reference."""
    for way in ways:
        _warm_up(way, sets)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    _warm_up(ways[0], sets)
    end.record()
    torch.cuda.synchronize()
    microseconds = 1e3 * start.elapsed_time(end) / sets  # includes the gaps between launches, so short ones seem longer
    count = max(sets, min(LAUNCHES, math.ceil(ENOUGH / max(microseconds, 1.0))))
    graphs = [_captured(way, sets, count) for way in ways]
    _replays(graphs, 1, count)
    times = _replays(graphs, LOOK, count)
    best = min(statistics.median(found) for found in times)
    kept = [i for i, found in enumerate(times) if i == 0 or statistics.median(found) <= HOPELESS * best]
    for i, found in zip(kept, _replays([graphs[i] for i in kept], REPLAYS - LOOK, count), strict=True):
        times[i] += found
    return [_timing(found) for found in times]


def _warm_up(launch: Callable[[int], object], sets: int) -> None:
    """Compile, load and allocate before the capture."""
    held = [launch(i) for i in range(sets)]
    torch.cuda.synchronize()
    del held


def _captured(launch: Callable[[int], object], sets: int, count: int) -> torch.cuda.CUDAGraph:
    held: list[object] = [None] * sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            held[i % sets] = launch(i % sets)
    return graph


def _replays(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int, count: int) -> list[list[float]]:
    """Return microseconds per launch of every replay of each graph, the graphs replayed in turn."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(graphs) + 1)]
    marks[0].record()
    for mark, graph in zip(marks[1:], itertools.cycle(graphs), strict=False):
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [1e3 * a.elapsed_time(b) / count for a, b in itertools.pairwise(marks)]
    return [times[i :: len(graphs)] for i in range(len(graphs))]


def _timing(times: Sequence[float]) -> Timing:
    ordered = sorted(times)
    return Timing(statistics.median(ordered), ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5])


def rotating_sets(bytes_per_set: int) -> int:
    """Return how many buffer sets together exceed the L2 cache three times over."""
    cache: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(64, -(-3 * cache // max(1, bytes_per_set))))


def copy_bandwidth(megabytes: int = 1024) -> float:
    """Return GB/s of a device-to-device copy, bytes read plus written: the ceiling of a kernel that does both."""
    source = torch.empty(megabytes * 1_000_000, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    best = min(time_launches(lambda _: target.copy_(source), 1).median for _ in range(3))
    return 2 * source.nbytes / best / 1e3


def product_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """Return TFLOP/s of a large matrix product through torch on a GPU: the ceiling of computing in `dtype`."""
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product(_: int) -> None:
        torch.mm(a, b, out=out)

    return 2 * size**3 / time_launches(product, 1, launches=4).median / 1e6


def read_bandwidth(megabytes: int = 1024) -> float:
    """Return GB/s at which torch reads: the better of a sum and a product with a vector, which write almost nothing."""
    matrix = torch.empty(megabytes * 1_000_000 // (2 * 1024), 1024, dtype=torch.float16, device="cuda").normal_()
    vector = torch.ones(1024, dtype=torch.float16, device="cuda")
    ways = (lambda _: matrix.sum(), lambda _: torch.mv(matrix, vector))
    return matrix.nbytes / min(time_launches(way, 1).median for way in ways) / 1e3
