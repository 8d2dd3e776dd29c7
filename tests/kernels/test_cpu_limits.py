"""The measured limits of a CPU are not below what other code achieves."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from warpline.kernels.cpu import limits


def best(do: Callable[[], object], times: int = 10) -> float:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        do()
        found.append(time.perf_counter() - begun)
    return min(found)


def test_memory() -> None:
    """In at least one round of several: the share of neighbouring processes changes from second to second."""
    data = torch.ones(256_000_000 // 4)
    rounds = [(data.nbytes / best(data.sum) / 1e9, limits.read_gb_s(256)) for _ in range(5)]
    assert any(0.9 * torchs < ours < 5000 for torchs, ours in rounds), rounds


def test_what_a_cache_holds_is_read_faster() -> None:
    assert max(limits.read_gb_s(1) for _ in range(3)) > 1.2 * limits.read_gb_s(256)


def test_products() -> None:
    a, b = torch.randn(2, 1024, 1024)
    torchs = 2 * 1024**3 / best(lambda: a @ b) / 1e12
    single, codes = limits.product_tflop_s("fp32"), limits.product_tflop_s("int8")
    assert 0.8 * torchs < single < 100
    assert 0.8 * single < codes < 100
