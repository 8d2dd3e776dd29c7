"""The ladder of the matrix product: from one thread per output up to tensor cores."""

from __future__ import annotations

import functools

from warpline.kernels.arguments import Dims
from warpline.kernels.catalog import find
from warpline.kernels.ladder.rung import Ladder, Rung, below, in_constant_memory
from warpline.kernels.spec import THREADS_PER_WARP, Launch, Tunables

_TOP = find("matmul_bias")
_BLOCK = 256


def _per_thread(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(-(-dims["rows"] * dims["outputs"] // _BLOCK), _BLOCK)


def _per_warp(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(-(-dims["rows"] * dims["outputs"] * THREADS_PER_WARP // _BLOCK), _BLOCK)


def _tiles(each: int, dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    side = 16 * each
    return Launch(-(-dims["rows"] // side) * -(-dims["outputs"] // side), _BLOCK)


_lower = functools.partial(below, _TOP, header="ladder/matmul.cuh")
_warps = functools.partial(_lower, "matmul_coalesced", _per_warp)


def _dims(rows: int, outputs: int, inputs: int) -> Dims:
    return {"rows": rows, "outputs": outputs, "inputs": inputs}


MATMUL = Ladder(
    name="matmul",
    title="Matrix product with bias",
    dims=_dims(4096, 2304, 768),
    odd_dims=(
        *(_dims(n, n, n) for n in (1, 2, 3, 63, 65, 129)),
        _dims(129, 65, 96),
        _dims(7, 1023, 130),
        _dims(65, 63, 1028),
    ),
    yardsticks={"cuBLAS": _TOP.reference},
    rungs=(
        Rung(
            name="naive",
            spec=_lower("matmul_naive", _per_thread, options=(_BLOCK,), restrict=False),
            why="One thread per output, neighbours in neighbouring rows: 32 lanes read 32 cache lines at a time.",
        ),
        Rung(
            name="coalesced",
            spec=_warps(name="matmul_coalesced", options=(1, 4, _BLOCK), restrict=False),
            why="One warp per output: lanes read neighbouring inputs, one cache line, and add up at the end.",
        ),
        Rung(
            name="restrict",
            spec=_warps(name="matmul_restrict", options=(1, 4, _BLOCK)),
            why="__restrict__ promises that y overlaps nothing; it is written once, at the end: little to gain.",
        ),
        Rung(
            name="unrolled",
            spec=_warps(name="matmul_unrolled", options=(4, 4, _BLOCK)),
            why="Four steps of the loop at a time: four pairs of loads are in flight instead of one.",
        ),
        Rung(
            name="constant bias",
            variant=True,
            spec=_warps(name="matmul_constant", options=(4, 4, _BLOCK), **in_constant_memory(_TOP, "bias")),
            why="The bias in constant memory: of all numbers that an output needs, one comes from another cache.",
        ),
        Rung(
            name="float4",
            spec=_warps(name="matmul_float4", options=(4, 16, _BLOCK)),
            why="16 bytes per lane and load: a quarter of the load instructions for the same bytes.",
        ),
        Rung(
            name="shared tiles",
            spec=_lower("matmul_tiles", functools.partial(_tiles, 1), name="matmul_shared", options=(1,)),
            why="One block per 16 x 16 outputs: each element read into shared memory serves sixteen rows or columns.",
        ),
        Rung(
            name="register tiles",
            spec=_lower("matmul_tiles", functools.partial(_tiles, 4), name="matmul_register", options=(4,)),
            why="4 x 4 outputs per thread: eight vectors from shared memory serve 64 products, where two served four.",
        ),
        Rung(
            name="pipelined",
            spec=_TOP,
            why="The production kernel: larger tiles, and the next ones are copied while these are multiplied.",
        ),
        Rung(
            name="tensor cores",
            spec=_TOP,
            dtype="fp16",
            why="The production kernel in fp16: half the bytes, and an instruction multiplies 16 x 16 by 16 x 8.",
        ),
    ),
)
