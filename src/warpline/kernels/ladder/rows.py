"""The ladders of LayerNorm and softmax: which threads own a row, how sums are combined, how often the row is read."""

from __future__ import annotations

import functools

from warpline.kernels.arguments import Dims
from warpline.kernels.catalog import find
from warpline.kernels.ladder.rung import Ladder, Rung, below
from warpline.kernels.spec import THREADS_PER_WARP, Launch, Tunables

_LAYERNORM, _SOFTMAX = find("layernorm"), find("softmax")
_BLOCK = 128


def _row_per_thread(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(-(-dims["rows"] // _BLOCK), _BLOCK)


def _row_per_block(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(dims["rows"], 2 * _BLOCK)


def _row_per_warps(row_warps: int, dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(-(-dims["rows"] * row_warps * THREADS_PER_WARP // _BLOCK), _BLOCK)


_one_warp, _four_warps = functools.partial(_row_per_warps, 1), functools.partial(_row_per_warps, 4)
_layernorm = functools.partial(below, _LAYERNORM, header="ladder/layernorm.cuh")
_softmax = functools.partial(below, _SOFTMAX, header="ladder/softmax.cuh")


def _dims(rows: int, columns: int) -> Dims:
    return {"rows": rows, "columns": columns}


_ODD = (
    *(_dims(5, columns) for columns in (1, 2, 3, 63, 64, 65, 127, 129, 1023)),
    *(_dims(rows, 96) for rows in (1, 3, 4, 63, 129, 257)),
)

LAYERNORM = Ladder(
    name="layernorm",
    title="LayerNorm",
    dims=_dims(16384, 768),
    odd_dims=_ODD,
    yardsticks={"torch": _LAYERNORM.reference},
    rungs=(
        Rung(
            name="naive",
            spec=_layernorm("layernorm_naive", _row_per_thread, options=(_BLOCK,)),
            why="One thread per row, three passes: lanes read addresses a row apart, 32 cache lines for 32 numbers.",
        ),
        Rung(
            name="tree",
            spec=_layernorm("layernorm_tree", _row_per_block, options=(2 * _BLOCK,)),
            why="One block per row: coalesced reads, and sums in a tree in shared memory, with a barrier per level.",
        ),
        Rung(
            name="warp",
            spec=_layernorm("layernorm_warps", _one_warp, name="layernorm_warp", options=(1, 4, _BLOCK)),
            why="One warp per row: lanes exchange registers in five steps, without shared memory or barriers.",
        ),
        Rung(
            name="block",
            variant=True,
            spec=_layernorm("layernorm_warps", _four_warps, name="layernorm_block", options=(4, 4, _BLOCK)),
            why="Four warps per row, which add their sums in shared memory: for rows that one warp could not hold.",
        ),
        Rung(
            name="float4",
            spec=_layernorm("layernorm_warps", _one_warp, name="layernorm_float4", options=(1, 16, _BLOCK)),
            why="16 bytes per lane and load: a quarter of the instructions, and four times the bytes in flight.",
        ),
        Rung(
            name="registers",
            spec=_LAYERNORM,
            why="The production kernel: the row stays in registers and is read once, all loads in flight together.",
        ),
    ),
)

SOFTMAX = Ladder(
    name="softmax",
    title="Softmax",
    dims=_dims(16384, 1024),
    odd_dims=_ODD,
    yardsticks={"torch": _SOFTMAX.reference},
    rungs=(
        Rung(
            name="naive",
            spec=_softmax("softmax_naive", _row_per_thread, options=(_BLOCK,)),
            why="One thread per row, three passes: lanes read addresses a row apart, 32 cache lines for 32 numbers.",
        ),
        Rung(
            name="tree",
            spec=_softmax("softmax_tree", _row_per_block, options=(2 * _BLOCK,)),
            why="One block per row: coalesced reads; maximum and sum by trees in shared memory.",
        ),
        Rung(
            name="warp",
            spec=_softmax("softmax_warps", _one_warp, name="softmax_warp", options=(1, 4, 0, _BLOCK)),
            why="One warp per row: lanes exchange registers in five steps, without shared memory or barriers.",
        ),
        Rung(
            name="block",
            variant=True,
            spec=_softmax("softmax_warps", _four_warps, name="softmax_block", options=(4, 4, 0, _BLOCK)),
            why="Four warps per row, combined in shared memory: for rows that one warp could not hold.",
        ),
        Rung(
            name="float4",
            spec=_softmax("softmax_warps", _one_warp, name="softmax_float4", options=(1, 16, 0, _BLOCK)),
            why="16 bytes per lane and load: a quarter of the instructions, and four times the bytes in flight.",
        ),
        Rung(
            name="online",
            spec=_softmax("softmax_warps", _one_warp, name="softmax_online", options=(1, 16, 1, _BLOCK)),
            why="Maximum and sum in one pass: the running sum is scaled down when a larger number is found.",
        ),
        Rung(
            name="registers",
            spec=_SOFTMAX,
            why="The production kernel: the row stays in registers, with one read and one exponential per element.",
        ),
    ),
)
