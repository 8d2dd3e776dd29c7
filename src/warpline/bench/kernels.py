"""Time the catalog's kernels on this GPU, each beside torch doing the same and beside what the memory can deliver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from warpline.bench.rows import provenance
from warpline.bench.timing import copy_bandwidth, rotating_sets, time_launches
from warpline.errors import DeviceError
from warpline.kernels import launch
from warpline.kernels.spec import Dims, KernelSpec, as_kwargs
from warpline.model.weights import TORCH_DTYPES


def require_gpu() -> None:
    """Say in one line that there is nothing to time on."""
    if not torch.cuda.is_available():
        raise DeviceError("timing kernels needs a CUDA GPU: 'warpline kernels compile' works without one")


def bench(specs: list[KernelSpec], dtypes: list[str]) -> Iterator[dict[str, Any]]:
    """One row per kernel, bench shape and dtype."""
    require_gpu()
    origin = provenance() | {"copy_gb_s": round(copy_bandwidth(), 1)}
    arch = launch.arch_of(torch.cuda.current_device())
    for spec in specs:
        for dtype in dtypes:
            if spec.runs_on(dtype, arch):
                for dims in spec.bench_dims:
                    yield _row(spec, dtype, dims, origin)


def random_inputs(spec: KernelSpec, dtype: str, dims: Dims, seed: int, device: str = "cuda") -> list[torch.Tensor]:
    """Fresh inputs: normal numbers in the storage type, and indices that are in range."""
    generator = torch.Generator(device).manual_seed(seed)
    kind = TORCH_DTYPES[dtype]
    return [
        torch.randn(buffer.shape(dims), generator=generator, device=device).to(kind)
        if buffer.indexes is None
        else torch.randint(dims[buffer.indexes], buffer.shape(dims), generator=generator, device=device)
        for buffer in spec.inputs
    ]


def new_outputs(spec: KernelSpec, dtype: str, dims: Dims, device: str = "cuda") -> list[torch.Tensor]:
    """Buffers for the results, poisoned."""
    return [torch.full(b.shape(dims), torch.nan, dtype=TORCH_DTYPES[dtype], device=device) for b in spec.outputs]


def _row(spec: KernelSpec, dtype: str, dims: Dims, origin: dict[str, Any]) -> dict[str, Any]:
    moved = spec.bytes(dims, dtype)
    sets = rotating_sets(moved)
    inputs = [random_inputs(spec, dtype, dims, seed) for seed in range(sets)]
    outputs = [new_outputs(spec, dtype, dims) for _ in range(sets)]
    floats = as_kwargs(spec, None)
    ours = time_launches(lambda i: launch.run(spec, inputs[i], outputs=outputs[i]), sets)
    torchs = time_launches(lambda i: spec.reference(*inputs[i], **floats), sets)
    gb_s = moved / ours.median / 1e3
    return origin | {
        "kernel": spec.name,
        "dtype": dtype,
        "dims": dict(dims),
        "us": round(ours.median, 3),
        "us_p20": round(ours.p20, 3),
        "us_p80": round(ours.p80, 3),
        "torch_us": round(torchs.median, 3),
        "gb_s": round(gb_s, 1),
        "tflop_s": round(spec.flops(dims) / ours.median / 1e6, 3),
        "percent_of_copy": round(100 * gb_s / origin["copy_gb_s"], 1),
    }
