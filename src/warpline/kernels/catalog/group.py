"""Products of a dozen to a thousand rows with LayerNorm or residual included, by warp groups (sm_90)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from warpline.config import DTYPE_BYTES
from warpline.hardware import ARCH_LIMITS
from warpline.kernels.arguments import FLOAT, STORAGE, Absent, Dims, Scalar, between, reads, tiles, writes
from warpline.kernels.catalog.products import product_flops, shapes
from warpline.kernels.spec import THREADS_PER_WARP, KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    from torch import Tensor

_SLICE = 16  # SLICE of statistics.cuh
_DEPTH = 64  # inputs of a tile: GROUP_ROW of warpgroup.cuh
_TUNABLES = {
    "tile_m": (128, 64),
    "tile_n": (48, 16, 32, 64, 96, 128, 144, 192),
    "splits": (1, 2, 4),
    "stages": (4, 1, 2, 3, 5, 6, 8, 12),
    "chains": (2, 1),
    "segments": (1, 2, 4),
}
#: Tiles (rows, outputs, splits) in the order in which they are tried, and the inputs from which on clusters share them.
#: The first tiles whose blocks all run at once are the fastest or nearly so (H200, gpt2's products of 64 to 1,024
#: rows).
_NORM_TILES = ((64, 64, 1), (128, 48, 1), (128, 64, 1), (128, 96, 1), (128, 144, 1), (128, 192, 1))
_TILES = ((64, 16, 1), (64, 32, 1), (128, 32, 1), (128, 48, 1), (128, 64, 1), (128, 96, 1))
_SPLIT_TILES = ((64, 64, 4), (128, 64, 4), (128, 64, 2), (128, 48, 1))
_SPLIT_INPUTS = 2048
#: The same where bits must not depend on the tile, and where no library takes over with thousands of rows. Segments are
#: those of a cluster of four, also without a cluster.
_TILES_INVARIANT = (*_TILES, (128, 192, 1))
_SPLIT_TILES_INVARIANT = ((64, 64, 4), (128, 64, 4), (128, 48, 1), (128, 96, 1), (128, 128, 1))
#: Blocks that every card of 132 SMs runs at once: clusters of four leave some SMs idle. With 64 rows per block, more
#: blocks than this are also slower.
_BLOCKS, _FEW_BLOCKS = 128, 96
#: Registers of a thread for values kept during the products, out of 168: with nine warps one scheduler has three.
_REGISTERS = 160
#: Most bytes of a ring: with more, the first tiles of all blocks arrive later.
_RING_BYTES = 200_000


def _halves(tunables: Tunables) -> int:
    """Return HALVES of group_matmul.cuh: the warp groups that share 64 rows."""
    return 2 if tunables["tile_m"] == 64 and tunables["tile_n"] >= 32 else 1


def _allows(norm: bool) -> Callable[[Dims, Tunables, str], bool]:
    def allows(dims: Dims, tunables: Tunables, dtype: str) -> bool:
        """Whether a block has whole tiles of the inputs and leaves whole slices, and registers and shared memory
        suffice."""
        inputs, splits, halves = dims["inputs"], tunables["splits"], _halves(tunables)
        eights = tunables["tile_n"] // 8 // halves  # of a warp's outputs; there is no wgmma of nine
        whole = inputs % (_DEPTH * splits) == 0 and dims["outputs"] % _SLICE == 0
        whole = whole and eights != 9 and (norm or eights % 2 == 0) and (eights <= 16 or splits == 1)
        standards, lines, barriers = tunables["tile_m"] * 32, tunables["tile_n"] * 8, tunables["stages"] * 16
        shared = _launch(dims, tunables, dtype).shared_bytes + standards + lines + barriers
        chains, segments = tunables["chains"], tunables["segments"]
        whole = whole and (splits == 1 or segments == splits)
        whole = whole and inputs % (_DEPTH * segments) == 0 and (chains == 1 or eights <= 8)
        sums = eights * 4 * (chains + (segments > splits))
        statistics = inputs // _SLICE // halves if norm else 0
        fits = shared <= ARCH_LIMITS["sm_90"].block_shared_bytes and sums + statistics <= _REGISTERS
        tiles_of_block = inputs // splits // _DEPTH  # a stage is released when the next one is read, so one is too few
        return whole and fits and min(2, tiles_of_block) <= tunables["stages"] <= tiles_of_block

    return allows


def _defaults(norm: bool) -> Callable[[Dims, str, str], Tunables]:
    def defaults(dims: Dims, dtype: str, _arch: str) -> Tunables:
        tiles = _NORM_TILES if norm else _SPLIT_TILES if _in_clusters(dims) else _TILES
        return _first_at_once(dims, dtype, norm, tiles)

    return defaults


def _invariant(norm: bool) -> Callable[[Dims, str, str], Tunables]:
    def invariant(dims: Dims, dtype: str, _arch: str) -> Tunables:
        """Return tunables with one chain of sums, which fits into registers with tiles of every size."""
        clusters = not norm and _in_clusters(dims)
        tiles = _NORM_TILES if norm else _SPLIT_TILES_INVARIANT if clusters else _TILES_INVARIANT
        return _first_at_once(dims, dtype, norm, tiles, chains=1, segments=4 if clusters else 1)

    return invariant


def _in_clusters(dims: Dims) -> bool:
    """Whether there are so many inputs that clusters share them."""
    return dims["inputs"] >= _SPLIT_INPUTS and dims["inputs"] % (4 * _DEPTH) == 0


def _first_at_once(
    dims: Dims,
    dtype: str,
    norm: bool,
    tiles: tuple[tuple[int, int, int], ...],
    chains: int | None = None,
    segments: int | None = None,
) -> Tunables:
    """Return the first tiles whose blocks all run at once, or else the largest."""
    inputs, found = dims["inputs"], dict[str, int]()
    for m, n, splits in tiles:
        most = min(inputs // splits // _DEPTH, _RING_BYTES // ((m + n) * _DEPTH * DTYPE_BYTES[dtype]))
        stages = max((count for count in _TUNABLES["stages"] if count <= most), default=1)
        choice = {"tile_m": m, "tile_n": n, "splits": splits, "stages": stages}
        choice["chains"] = chains or (2 if n // 8 // _halves(choice) <= 8 else 1)
        choice["segments"] = segments or splits
        if not found or _allows(norm)(dims, choice, dtype):
            found = choice
        if _launch(dims, found, dtype).grid <= (_FEW_BLOCKS if splits == 4 or m == 64 else _BLOCKS):
            break
    return found


def _launch(dims: Dims, tunables: Tunables, dtype: str) -> Launch:
    m, n, splits, halves = tunables["tile_m"], tunables["tile_n"], tunables["splits"], _halves(tunables)
    ring = tunables["stages"] * (m + n) * _DEPTH * DTYPE_BYTES[dtype]
    received, finished = m * n // splits * (splits - 1) * 4, m * (n + 8 * halves) * DTYPE_BYTES[dtype]
    grid, alignment = -(-dims["rows"] // m) * -(-dims["outputs"] // n) * splits, 1024
    threads = (m // 16 * halves + 1) * THREADS_PER_WARP
    return Launch(grid, threads, max(ring, finished) + received + alignment, splits)


def in_tiles(weight: Tensor) -> Tensor:
    """Rearrange [outputs, inputs] to [inputs/64, outputs, 64]: the part of a tile of any outputs is contiguous. The
    eight chunks of a row are swizzled by the row's number, as in warpgroup.cuh."""
    return _exchanged(weight.view(len(weight), -1, _DEPTH).transpose(0, 1))


def from_tiles(tiles: Tensor) -> Tensor:
    """Invert `in_tiles`."""
    return _exchanged(tiles).transpose(0, 1).flatten(1)


def _exchanged(tiles: Tensor) -> Tensor:
    import torch

    rows, chunks = (torch.arange(count, device=tiles.device) for count in (tiles.shape[1], 8))
    order = (chunks ^ rows[:, None] % 8)[None, :, :, None]
    return torch.take_along_dim(tiles.unflatten(2, (8, -1)), order, dim=2).flatten(2)


def _standard_reference(*, gelu: bool) -> Callable[..., tuple[Tensor, ...]]:
    def reference(
        x: Tensor, statistics: Tensor, weight: Tensor, weight_sums: Tensor, bias: Tensor, epsilon: float
    ) -> tuple[Tensor, ...]:
        from torch.nn import functional as F

        means, squares = statistics.unbind(-1)  # of every slice and row
        mean = means.mean(0)
        variance = (squares + _SLICE * (means - mean) ** 2).mean(0) / _SLICE
        centred = F.linear(x, from_tiles(weight)) - mean[:, None] * weight_sums
        y = centred * (variance + epsilon).rsqrt()[:, None] + bias
        return (F.gelu(y, approximate="tanh") if gelu else y,)

    return reference


def _peer(*, norm: bool, gelu: bool) -> Callable[..., Tensor]:
    """Return torch's product with a checkpoint's weights; the order of their elements does not affect its time."""

    def standard(x: Tensor, _statistics: Tensor, weight: Tensor, _sums: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        from torch.nn import functional as F

        y = F.linear(F.layer_norm(x, x.shape[1:], eps=epsilon), weight.view(-1, x.shape[1]), bias.to(x.dtype))
        return F.gelu(y, approximate="tanh") if gelu else y

    def residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        from torch.nn import functional as F

        return F.linear(x, weight.view(-1, x.shape[1]), bias) + residual

    return standard if norm else residual


def _of_slices(columns: str) -> str:
    """Return the dimensions of the statistics of rows."""
    return f"{columns}/{_SLICE} rows 2"


def _statistics(x: Tensor) -> Tensor:
    import torch

    slices = x.view(len(x), -1, _SLICE)
    return torch.stack((slices.mean(-1), slices.var(-1, correction=0) * _SLICE), -1).transpose(0, 1)


def _residual_reference(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    from torch.nn import functional as F

    y = F.linear(x, from_tiles(weight), bias) + residual
    return y, _statistics(y)


def _group_matmul(
    name: str, summary: str, *, norm: bool, gelu: bool = False, bench: list[tuple[int, int, int]]
) -> KernelSpec:
    """Return the spec of a product after a LayerNorm, or before a residual, which also leaves the statistics of its
    rows."""
    return KernelSpec(
        name=name,
        summary=summary,
        header="ops/group_matmul.cuh",
        awaits=True,
        function="group_matmul",
        arguments=(
            tiles("x", "rows inputs", "tile_m"),
            reads("statistics", _of_slices("inputs"), between(0.5, 1.5)) if norm else Absent("statistics"),
            reads("weight", f"inputs/{_DEPTH} outputs {_DEPTH}"),  # as `in_tiles` returns it
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
        invariant=_invariant(norm),
        launch=_launch,
        flops=product_flops,
        reference=_standard_reference(gelu=gelu) if norm else _residual_reference,
        peers={"torch": _peer(norm=norm, gelu=gelu)},
        dtypes=("fp16", "bf16"),
        archs=("sm_90",),
        test_dims=shapes(
            [
                *((rows, 768, 768) for rows in (1, 7, 63, 64, 65, 127, 128, 129, 257)),
                (64, 16, 64),
                (100, 1008, 192),
                (65, 4096, 1024),
                (1000, 2304, 768),
                (1024, 3072, 768),
                *(() if norm else ((64, 768, 3072), (129, 768, 3072), (1000, 768, 3072), (100, 64, 4096))),
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
        -(-dims["rows"] * dims["columns"] // 4 // tunables["block"]), tunables["block"]
    ),
    flops=lambda dims: 4 * dims["rows"] * dims["columns"],
    reference=lambda x: (_statistics(x),),
    dtypes=("fp16", "bf16"),
    test_dims=tuple({"rows": rows, "columns": columns} for rows, columns in ((1, 16), (3, 48), (65, 768), (129, 1024))),
    bench_dims=({"rows": 64, "columns": 768}, {"rows": 128, "columns": 768}),
)

_COUNTS = (16, 64, 128, 256, 1024)
GROUP_MATMULS = (
    _group_matmul(
        "standard_matmul_bias",
        "rows standardised, matrix product, bias",
        norm=True,
        bench=[(rows, 2304, 768) for rows in _COUNTS],
    ),
    _group_matmul(
        "standard_matmul_bias_gelu",
        "rows standardised, matrix product, bias, GELU",
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
