"""How the threads of a team share a stage: one thread takes each piece, and all wait until all pieces have ended."""

from __future__ import annotations

import numpy as np
from numba import njit

from warpline.kernels.cpu.intrinsics import INNER, add_fetch, atomic_load, compare_exchange, sleep, wake
from warpline.kernels.cpu.words import Word

#: Polls before a thread sleeps: some 30 µs.
PATIENCE = 15_000


@njit(**INNER)
def claim(at: np.ndarray, end: int) -> int:
    """Return the number of a piece below `end` that no other thread has taken, or -1."""
    while True:
        piece = atomic_load(at[Word.NEXT.value])
        if piece >= end:
            return -1
        if compare_exchange(at[Word.NEXT.value], piece, piece + 1):
            return piece


@njit(**INNER)
def part_of(piece: int, pieces: int, threads: int) -> int:
    """Return which part of a matrix a piece is. Threads that take pieces in turn read neighbouring parts one after
    another, so data prefetched beyond the end of one part is what the thread reads next."""
    run = pieces // threads
    return piece % threads * run + piece // threads if piece < run * threads else piece


@njit(**INNER)
def complete(at: np.ndarray, end: int) -> None:
    """Count a piece as ended; the last one of a stage wakes the threads that sleep."""
    if add_fetch(at[Word.ENDED.value], 1) == end and atomic_load(at[Word.ASLEEP.value]) > 0:
        wake(at[Word.ENDED.value])


@njit(**INNER)
def wait(at: np.ndarray, end: int) -> None:
    """Wait until all pieces below `end` have ended: poll first, then sleep."""
    looks = 0
    while True:
        now = atomic_load(at[Word.ENDED.value])
        if now >= end:
            return
        looks += 1
        if looks > PATIENCE:
            add_fetch(at[Word.ASLEEP.value], 1)
            now = atomic_load(at[Word.ENDED.value])
            if now < end:
                sleep(at[Word.ENDED.value], now)
            add_fetch(at[Word.ASLEEP.value], -1)
