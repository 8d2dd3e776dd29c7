"""The ladder of causal attention: stored scores, tiles, the online softmax, tensor cores, a window."""

from __future__ import annotations

import functools

from warpline.kernels.arguments import Absent, Buffer, Dims, scratch
from warpline.kernels.catalog import find
from warpline.kernels.ladder.rung import Ladder, Rung, below, present
from warpline.kernels.spec import THREADS_PER_WARP, KernelSpec, Launch, Tunables

_TOP = find("flash_attention")
_BLOCK, _TILE, _TILE_BLOCK = 128, 32, 256
_WINDOW = 256
#: Largest heads: beyond them a thread's registers, or the shared memory of a block without a request for more, are
#: full.
_MOST_DEPTH_ALONE, _MOST_DEPTH_TILED = 64, 96


def _with_scores(stored: bool) -> tuple[object, ...]:
    """Return the arguments, with a scratch buffer for scores if they are stored."""
    scores: Buffer | Absent = scratch("scores", "batch heads queries keys") if stored else Absent("scores")
    arguments = present(_TOP)
    at = 1 + next(i for i, a in enumerate(arguments) if isinstance(a, Buffer) and a.role == "output")
    return (*arguments[:at], scores, *arguments[at:])


def _per_thread(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(-(-dims["batch"] * dims["heads"] * dims["queries"] // _BLOCK), _BLOCK)


def _per_warp(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(-(-dims["batch"] * dims["heads"] * dims["queries"] * THREADS_PER_WARP // _BLOCK), _BLOCK)


def _tiles(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(dims["batch"] * dims["heads"] * -(-dims["queries"] // _TILE), _TILE_BLOCK)


_lower = functools.partial(below, _TOP, header="ladder/attention.cuh")


def _tiled(name: str, *, online: bool) -> KernelSpec:
    return _lower(
        "attention_tiles",
        _tiles,
        name=name,
        arguments=_with_scores(not online),
        options=(int(online),),
        allows=lambda dims, _tunables, _dtype: dims["depth"] <= _MOST_DEPTH_TILED,
    )


def _dims(batch: int, heads: int, queries: int, depth: int = 64, keys: int | None = None, window: int = 0) -> Dims:
    dims = {"batch": batch, "heads": heads, "queries": queries, "keys": keys or queries, "depth": depth}
    return dims | ({"window": window} if window else {})


ATTENTION = Ladder(
    name="attention",
    title="Causal attention",
    dims=_dims(1, 12, 1024),
    tied={"keys": "queries"},
    odd_dims=(
        *(_dims(2, 3, queries) for queries in (1, 2, 3, 31, 32, 33, 63, 65, 129)),
        *(_dims(2, 2, 65, depth) for depth in (1, 3, 24, 33, 63)),
        *(_dims(3, 2, 5, keys=keys) for keys in (5, 6, 65, 200)),
        *(_dims(2, 2, 129, window=window) for window in (1, 2, 31, 33, 64, 500)),
        _dims(2, 2, 70, keys=300, window=33),
    ),
    yardsticks=_TOP.peers,
    rungs=(
        Rung(
            name="naive",
            spec=_lower("attention_naive", _per_thread, arguments=_with_scores(True), options=(_BLOCK,)),
            why="One thread per query, scores stored and read again as by three kernels: lanes read rows far apart.",
        ),
        Rung(
            name="online alone",
            variant=True,
            spec=_lower(
                "attention_lonely",
                _per_thread,
                options=(_BLOCK,),
                approximation=64 * 2**-24,  # a thread adds the values one after another, so errors grow further
                allows=lambda dims, _tunables, _dtype: dims["depth"] <= _MOST_DEPTH_ALONE,
            ),
            why="The online softmax with nothing else: no stored scores, but few threads, full of registers.",
        ),
        Rung(
            name="coalesced",
            spec=_lower("attention_coalesced", _per_warp, arguments=_with_scores(True), options=(_BLOCK,)),
            why="One warp per query: lanes read neighbouring elements of a key or value and reduce every score.",
        ),
        Rung(
            name="shared tiles",
            spec=_tiled("attention_shared", online=False),
            why="One block per 32 queries: a key or value is read once for all of them, and each lane has one score.",
        ),
        Rung(
            name="online",
            spec=_tiled("attention_online", online=True),
            why="The online softmax (FlashAttention): keys and values are read together, and no score goes to memory.",
        ),
        Rung(
            name="register tiles",
            spec=_TOP,
            why="The production kernel in fp32: a thread has several queries and keys, a vector serves many products.",
        ),
        Rung(
            name="tensor cores",
            spec=_TOP,
            dtype="fp16",
            why="The production kernel in fp16: both products on tensor cores, the weights never leave the registers.",
        ),
        Rung(
            name="window",
            variant=True,
            spec=_TOP,
            dtype="fp16",
            numbers={"window": _WINDOW},
            why=f"A window of {_WINDOW} positions: another result, from fewer keys, and those outside are never read.",
        ),
    ),
)
