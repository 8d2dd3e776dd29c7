"""The table of contents of everything we launch: one entry per op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warpline.errors import one_of
from warpline.kernels.spec import THREADS_PER_WARP, Dims, KernelSpec, Launch, Scalar, Tunables, reads, writes

if TYPE_CHECKING:
    from torch import Tensor


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    from torch.nn import functional as F

    return (F.layer_norm(x, x.shape[-1:], weight, bias, epsilon),)


def _residual_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, ...]:
    total = x + residual
    return total, *_layernorm(total, weight, bias, epsilon)


def _row_warps(dims: Dims) -> int:
    """Warps that share a row: as few as keep a lane's part of it in a comfortable number of registers."""
    return next(warps for warps in (1, 2, 4, 8) if warps == 8 or dims["columns"] <= warps * THREADS_PER_WARP * 24)


def _row_defaults(dims: Dims) -> Tunables:
    return {"block": 256, "row_warps": _row_warps(dims)}


def _one_row_per_group(dims: Dims, tunables: Tunables) -> Launch:
    rows_per_block = tunables["block"] // (tunables["row_warps"] * THREADS_PER_WARP)
    return Launch(-(-dims["rows"] // rows_per_block), tunables["block"])


_ROW_TUNABLES = {"block": (256, 128, 512, 1024), "row_warps": (1, 2, 4, 8)}
_ODD = (1, 2, 3, 63, 64, 65, 127, 128, 129, 1023, 1024)
_ROW_TESTS: tuple[Dims, ...] = (
    *({"rows": rows, "columns": 768} for rows in (1, 2, 3, 7, 8, 9, 63, 65, 128)),
    *({"rows": 5, "columns": columns} for columns in (*_ODD, 256, 1280, 1600, 4097)),
)
_ROW_BENCH: tuple[Dims, ...] = (
    {"rows": 1, "columns": 768},
    {"rows": 1024, "columns": 768},
    {"rows": 16384, "columns": 768},
    {"rows": 65536, "columns": 768},
    {"rows": 65536, "columns": 1600},
)

LAYERNORM = KernelSpec(
    name="layernorm",
    summary="LayerNorm of rows, one pass over memory",
    header="ops/layernorm.cuh",
    arguments=(
        reads("x", "rows columns"),
        reads("weight", "columns"),
        reads("bias", "columns"),
        writes("y", "rows columns"),
        Scalar("rows"),
        Scalar("epsilon", 1e-5),
    ),
    constants=("columns",),
    tunables=_ROW_TUNABLES,
    default=_row_defaults,
    launch=_one_row_per_group,
    flops=lambda dims: 8 * dims["rows"] * dims["columns"],
    reference=_layernorm,
    test_dims=_ROW_TESTS,
    bench_dims=_ROW_BENCH,
)

RESIDUAL_LAYERNORM = KernelSpec(
    name="residual_layernorm",
    summary="residual addition and LayerNorm of the sum; both are kept",
    header="ops/layernorm.cuh",
    arguments=(
        reads("x", "rows columns"),
        reads("residual", "rows columns"),
        reads("weight", "columns"),
        reads("bias", "columns"),
        writes("sum", "rows columns"),
        writes("y", "rows columns"),
        Scalar("rows"),
        Scalar("epsilon", 1e-5),
    ),
    constants=("columns",),
    tunables=_ROW_TUNABLES,
    default=_row_defaults,
    launch=_one_row_per_group,
    flops=lambda dims: 9 * dims["rows"] * dims["columns"],
    reference=_residual_layernorm,
    test_dims=_ROW_TESTS,
    bench_dims=_ROW_BENCH,
)

CATALOG: dict[str, KernelSpec] = {spec.name: spec for spec in (LAYERNORM, RESIDUAL_LAYERNORM)}


def find(name: str) -> KernelSpec:
    """The spec called `name`; an unknown name suggests the nearest."""
    return CATALOG[one_of(name, CATALOG, "kernel")]
