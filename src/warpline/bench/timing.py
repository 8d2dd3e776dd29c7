"""How kernels are timed: graph replays over rotating buffers, so that neither launch gaps nor a warm L2 mislead."""

from __future__ import annotations

import itertools
import statistics
import timeit
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Launches captured in one graph, and graph replays measured one by one.
LAUNCHES, REPLAYS = 20, 15


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per launch."""

    median: float
    p20: float
    p80: float


def time_launches(launch: Callable[[int], object], sets: int, launches: int = LAUNCHES) -> Timing:
    """Time `launch(i)`, which uses buffer set i of `sets`; the sets together must exceed the L2 cache. What it returns
    is kept until its set's next turn: freed at once, the same memory would serve every time and stay in the cache."""
    count = max(launches, sets)
    held: list[object] = [None] * sets
    for i in range(sets):  # compiles, loads and allocates before anything is captured
        held[i] = launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            held[i % sets] = launch(i % sets)
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(1e3 * a.elapsed_time(b) / count for a, b in itertools.pairwise(marks))
    return Timing(statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5])


def rotating_sets(bytes_per_set: int) -> int:
    """How many buffer sets it takes to read and write past the L2 cache three times over."""
    cache: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(64, -(-3 * cache // max(1, bytes_per_set))))


def copy_bandwidth(megabytes: int = 1024) -> float:
    """GB/s of a device-to-device copy, bytes read plus bytes written: the ceiling of a kernel that does both."""
    source = torch.empty(megabytes * 1_000_000, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    best = min(time_launches(lambda _: target.copy_(source), 1).median for _ in range(3))
    return 2 * source.nbytes / best / 1e3


def product_rate(dtype: torch.dtype, size: int = 8192, device: str = "cuda") -> float:
    """TFLOP/s of a large matrix product through torch: the ceiling of what computes in `dtype`."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product(_: int) -> None:
        torch.mm(a, b, out=out)

    if device == "cpu":
        microseconds = 1e6 * min(timeit.repeat(lambda: product(0), number=1, repeat=5))
    else:
        microseconds = time_launches(product, 1, launches=4).median
    return 2 * size**3 / microseconds / 1e6


def read_bandwidth(megabytes: int = 1024) -> float:
    """GB/s at which torch reads: the better of a sum and a product with a vector, which write next to nothing."""
    matrix = torch.empty(megabytes * 1_000_000 // (2 * 1024), 1024, dtype=torch.float16, device="cuda").normal_()
    vector = torch.ones(1024, dtype=torch.float16, device="cuda")
    ways = (lambda _: matrix.sum(), lambda _: torch.mv(matrix, vector))
    return matrix.nbytes / min(time_launches(way, 1).median for way in ways) / 1e3
