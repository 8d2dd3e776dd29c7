"""Products of a dozen to a hundred rows that have their LayerNorm or residual with them, by warpgroups (sm_90)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from warpline.config import DTYPE_BYTES
from warpline.hardware import ARCH_LIMITS
from warpline.kernels.catalog.products import product_flops, shapes
from warpline.kernels.spec import (
    FLOAT,
    STORAGE,
    Absent,
    Dims,
    KernelSpec,
    Launch,
    Scalar,
    Tunables,
    between,
    reads,
    writes,
)

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 64  # of a tile, and elements of the inputs that it holds
_SLICE = 16  # SLICE of statistics.cuh
_TUNABLES = {"tile_n": (32, 16, 64, 48, 96), "splits": (1, 2, 4, 8)}
#: Blocks of which every sm_90 card, with 114 SMs or more, runs all at once, in clusters too.
_BLOCKS = 96


def _allows(norm: bool) -> Callable[[Dims, Tunables, str], bool]:
    def allows(dims: Dims, tunables: Tunables, dtype: str) -> bool:
        """A block has whole tiles of the inputs, and room for all of them. With a LayerNorm there are no clusters: the
        kernel looks a row's statistics up as if it finished all rows of its tile."""
        splits = tunables["splits"]
        whole = dims["inputs"] % (_ROWS * splits) == 0 and dims["outputs"] % _SLICE == 0 and not (norm and splits > 1)
        shared = _launch(dims, tunables, dtype).shared_bytes + _STANDARDS_BYTES
        return whole and shared <= ARCH_LIMITS["sm_90"].block_shared_bytes

    return allows


_STANDARDS_BYTES = 4 * _ROWS * 8  # RowStandards::Shared


def _defaults(norm: bool) -> Callable[[Dims, str, str], Tunables]:
    def defaults(dims: Dims, dtype: str, _arch: str) -> Tunables:
        """The narrowest tiles of which all run at once, and no larger clusters than they need."""
        possible = [
            choice
            for splits in _TUNABLES["splits"]
            for n in (16, 32, 48, 64)  # more were never the fastest
            if _allows(norm)(dims, choice := {"tile_n": n, "splits": splits}, dtype)
        ]
        at_once = [choice for choice in possible if _launch(dims, choice, dtype).grid <= _BLOCKS]
        return next(iter(at_once), possible[-1] if possible else {"tile_n": 16, "splits": 1})

    return defaults


def _launch(dims: Dims, tunables: Tunables, dtype: str) -> Launch:
    n, splits = tunables["tile_n"], tunables["splits"]
    tiles = (_ROWS + n) * dims["inputs"] // splits * DTYPE_BYTES[dtype]
    sums, alignment = _ROWS * (n + 8) * 4, 1024
    grid = -(-dims["rows"] // _ROWS) * -(-dims["outputs"] // n) * splits
    return Launch(grid, 256, tiles + sums + alignment, splits)


def _standard_reference(*, gelu: bool) -> Callable[..., tuple[Tensor, ...]]:
    def reference(
        x: Tensor, statistics: Tensor, weight: Tensor, weight_sums: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[Tensor, ...]:
        from torch.nn import functional as F

        means, squares = statistics.unbind(-1)  # of every slice and row
        mean = means.mean(0)
        variance = (squares + _SLICE * (means - mean) ** 2).mean(0) / _SLICE
        y = (F.linear(x, weight) - mean[:, None] * weight_sums) * (variance + epsilon).rsqrt()[:, None] + bias
        return (F.gelu(y, approximate="tanh") if gelu else y,)

    return reference


def _of_slices(columns: str) -> str:
    """Dimensions of the statistics of rows."""
    return f"{columns}/{_SLICE} rows 2"


def _statistics(x: Tensor) -> Tensor:
    import torch

    slices = x.view(len(x), -1, _SLICE)
    return torch.stack((slices.mean(-1), slices.var(-1, correction=0) * _SLICE), -1).transpose(0, 1)


def _residual_reference(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    from torch.nn import functional as F

    y = F.linear(x, weight, bias) + residual
    return y, _statistics(y)


def _group_matmul(
    name: str, summary: str, *, norm: bool, gelu: bool = False, bench: list[tuple[int, int, int]]
) -> KernelSpec:
    """With a LayerNorm before it, or else a residual behind it, whose rows it leaves the statistics of."""
    return KernelSpec(
        name=name,
        summary=summary,
        header="ops/group_matmul.cuh",
        awaits=True,
        function="group_matmul",
        arguments=(
            reads("x", "rows inputs"),
            reads("statistics", _of_slices("inputs"), between(0.5, 1.5)) if norm else Absent("statistics"),
            reads("weight", "outputs inputs"),
            reads("weight_sums", "outputs", FLOAT) if norm else Absent("weight_sums"),
            reads("bias", "outputs", FLOAT if norm else STORAGE),
            Absent("residual") if norm else reads("residual", "rows outputs"),
            writes("y", "rows outputs"),
            Absent("left_statistics") if norm else writes("left_statistics", _of_slices("outputs"), FLOAT),
            Scalar("rows"),
            Scalar("epsilon", 1e-5) if norm else Absent("epsilon", "0.f"),
        ),
        constants=("outputs", "inputs"),
        options=(int(gelu),),
        tunables=_TUNABLES,
        allows=_allows(norm),
        default=_defaults(norm),
        launch=_launch,
        flops=product_flops,
        reference=_standard_reference(gelu=gelu) if norm else _residual_reference,
        dtypes=("fp16", "bf16"),
        archs=("sm_90",),
        test_dims=shapes(
            [
                *((rows, 768, 768) for rows in (1, 7, 63, 64, 65, 127, 128, 129, 257)),
                (64, 16, 64),
                (100, 1008, 192),
                (65, 4096, 1024),
                *(() if norm else ((64, 768, 3072), (100, 64, 4096))),
            ]
        ),
        bench_dims=shapes(bench),
    )


ROW_STATISTICS = KernelSpec(
    name="row_statistics",
    summary="mean and variance of slices of rows",
    header="ops/row_statistics.cuh",
    arguments=(reads("x", "rows columns"), writes("statistics", _of_slices("columns"), FLOAT), Scalar("rows")),
    constants=("columns",),
    tunables={"block": (128, 64, 256)},
    allows=lambda dims, _tunables, _dtype: dims["columns"] % _SLICE == 0,
    default=lambda _dims, _dtype, _arch: {"block": 128},
    launch=lambda dims, tunables, _dtype: Launch(
        -(-dims["rows"] * dims["columns"] // 8 // tunables["block"]), tunables["block"]
    ),
    flops=lambda dims: 4 * dims["rows"] * dims["columns"],
    reference=lambda x: (_statistics(x),),
    dtypes=("fp16", "bf16"),
    test_dims=tuple({"rows": rows, "columns": columns} for rows, columns in ((1, 16), (3, 48), (65, 768), (129, 1024))),
    bench_dims=({"rows": 64, "columns": 768}, {"rows": 128, "columns": 768}),
)

_COUNTS = (16, 64, 128)
GROUP_MATMULS = (
    _group_matmul(
        "standard_matmul_bias",
        "rows made mean 0 and variance 1, matrix product, bias",
        norm=True,
        bench=[(rows, 2304, 768) for rows in _COUNTS],
    ),
    _group_matmul(
        "standard_matmul_bias_gelu",
        "rows made mean 0 and variance 1, matrix product, bias, GELU",
        norm=True,
        gelu=True,
        bench=[(rows, 3072, 768) for rows in _COUNTS],
    ),
    _group_matmul(
        "group_matmul_bias_residual",
        "matrix product by warpgroups, bias, residual",
        norm=False,
        bench=[(rows, 768, inputs) for rows in _COUNTS for inputs in (768, 3072)],
    ),
)
