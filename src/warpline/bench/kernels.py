"""Time the catalog's kernels on this GPU, each beside torch doing the same and beside the memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from warpline.bench.rows import provenance
from warpline.bench.timing import copy_bandwidth, product_rate, rotating_sets, time_launches
from warpline.errors import DeviceError
from warpline.hardware import arch_supports
from warpline.kernels import launch
from warpline.kernels.arguments import Dims
from warpline.kernels.launch import TORCH_TYPES
from warpline.kernels.spec import KernelSpec
from warpline.kernels.verify import random_inputs


def require_gpu() -> None:
    """Raise if there is no GPU to time on."""
    if not torch.cuda.is_available():
        raise DeviceError("timing kernels needs a CUDA GPU: 'warpline kernels compile' works without one")


def bench(specs: list[KernelSpec], dtypes: list[str], arch: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per kernel, bench shape and dtype; `arch` (as compute_75) compiles for another GPU."""
    require_gpu()
    origin = provenance() | {"copy_gb_s": round(copy_bandwidth(), 1)}
    arch = arch or launch.arch_of(torch.cuda.current_device())
    peaks = {dtype: product_rate(TORCH_TYPES[dtype]) for dtype in dtypes if arch_supports(arch, dtype)}
    for spec in specs:
        for dtype in dtypes:
            if spec.runs_on(dtype, arch):
                for dims in spec.bench_dims:
                    yield _row(spec, dtype, dims, arch, origin, peaks[dtype])


def _row(spec: KernelSpec, dtype: str, dims: Dims, arch: str, origin: dict[str, Any], peak: float) -> dict[str, Any]:
    sets = rotating_sets(spec.bytes(dims, dtype))
    inputs = [random_inputs(spec, dtype, dims, seed, full=True) for seed in range(sets)]
    numbers = spec.number_values(dims)
    calls = [launch.Call(spec, tensors, numbers=numbers, arch=arch) for tensors in inputs]
    ours = time_launches(lambda i: calls[i].launch(), sets)
    peers = {
        name: round(time_launches(lambda i, do=do: do(*inputs[i], **numbers), sets).median, 3)  # type: ignore[misc]
        for name, do in (spec.peers or {"torch": spec.reference}).items()
    }
    best = min(peers, key=lambda name: peers[name])
    return origin | {
        "kernel": spec.name,
        "arch": arch,
        "dtype": dtype,
        "dims": dict(dims),
        "tunables": dict(calls[0].program[0].tunables),  # the default's, or those a sweep on this GPU found
        "us": round(ours.median, 3),
        "us_p20": round(ours.p20, 3),
        "us_p80": round(ours.p80, 3),
        "torch_us": peers[best],
        "torch_by": best,
        "peers_us": peers,
        **rates(spec, dtype, dims, ours.median, origin["copy_gb_s"], peak),
    }


def rates(spec: KernelSpec, dtype: str, dims: Dims, us: float, copy_gb_s: float, peak: float) -> dict[str, Any]:
    """Return the rates of an op that takes `us` microseconds, as shares of its roof: a copy at `copy_gb_s`, or a large
    product at `peak` TFLOP/s."""
    moved, flops = spec.bytes(dims, dtype), spec.flops(dims)
    gb_s, tflop_s = moved / us / 1e3, flops / us / 1e6
    return {
        "gb_s": round(gb_s, 1),
        "tflop_s": round(tflop_s, 3),
        "peak_tflop_s": round(peak, 1),
        "bound": "memory" if moved / copy_gb_s / 1e9 > flops / peak / 1e12 else "compute",
        "percent_of_copy": round(100 * gb_s / copy_gb_s, 1),
        "percent_of_roof": round(100 * max(gb_s / copy_gb_s, tflop_s / peak), 1),
    }
