"""Attention: of a rectangle of queries, and of one new query per sequence over the KV cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from warpline.config import DTYPE_BYTES
from warpline.hardware import arch_number
from warpline.kernels.arguments import (
    BITS,
    CODES,
    SCALES,
    STORAGE,
    TO_CODES,
    Absent,
    Dims,
    Scalar,
    count_of,
    distinct,
    reads,
    scratch,
    updates,
    views,
    writes,
)
from warpline.kernels.spec import THREADS_PER_WARP, KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    import torch
    from torch import Tensor


#: Most warps of a block of attention: with more, a thread has fewer registers than its part of the output needs.
MOST_WARPS = 16


def _attention(q: Tensor, k: Tensor, v: Tensor, length: Tensor, window: int, scale: float) -> tuple[Tensor, ...]:
    """Reference: the queries are the last of the keys' positions; those at `length` and beyond get zeros."""
    import torch

    queries, keys = q.shape[-2], k.shape[-2]
    position = torch.arange(keys - queries, keys, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)
    seen = key <= position
    if window > 0:
        seen &= key > position - window
    scores = (q @ k.transpose(-2, -1) * scale).masked_fill(~seen, -torch.inf)
    y = (scores.softmax(dim=-1) @ v).transpose(1, 2)  # [batch, queries, heads, depth]
    exists = length[:, None] > position.T  # [batch, queries]
    return (y * exists[..., None, None],)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, _length: Tensor, window: int, scale: float) -> Tensor:
    """Attention by torch: FlashAttention in half precision without a window, which it does not support; else torch's
    choice."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if window > 0:
        mask = _mask(q.shape[2], k.shape[2], window, q.dtype, q.device)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if q.dtype != torch.float32:
        backends = [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale)


def _plain(q: Tensor, k: Tensor, v: Tensor, _length: Tensor, window: int, scale: float) -> Tensor:
    """Attention in three kernels: scores with the mask added, softmax, values."""
    import torch

    mask = _mask(q.shape[2], k.shape[2], window, q.dtype, q.device)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1), alpha=scale)
    return scores.softmax(dim=-1) @ v.flatten(0, 1)


@functools.lru_cache(maxsize=8)
def _mask(queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask [1, queries, keys]: 0 where a query sees a key, else -inf."""
    import torch

    hidden = ~torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if window > 0:
        hidden |= torch.ones_like(hidden).tril(keys - queries - window)
    return torch.zeros(1, queries, keys, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)


#: Tunables of both ops that attend to many queries at once.
FLASH_TUNABLES = {
    "tile_queries": (64, 32, 128),
    "tile_keys": (64, 32, 128),
    "warps": (4, 2, 8),
    "teams": (1, 2, 4),
    "stages": (2, 3),
}


def flash_allows(_dims: Dims, tunables: Tunables, dtype: str) -> bool:
    """Whether each warp has a multiple of 16 queries; in fp32, whether a tile fits 16 x 16 threads."""
    queries, warps, teams = (tunables[n] for n in ("tile_queries", "warps", "teams"))
    if dtype == "fp32":
        return warps == 8 and teams == 1
    return queries % (16 * warps) == 0 and warps * teams <= MOST_WARPS


def flash_defaults(depth: int, blocks: Callable[[int], int], dtype: str, arch: str) -> Tunables:
    """Return the defaults for heads of `depth`; blocks(queries) is the number of blocks with such tiles of queries."""
    if dtype == "fp32":
        roomy = arch_number(arch) in (80, 90, 100) and depth <= 64
        few = depth > 64 or blocks(64) < (132 if roomy else 264)
        # Shared memory limits the keys: less on Turing, twice as much per key where heads are large.
        keys = 128 if roomy else 32 if depth > 64 or (not few and arch_number(arch) < 80) else 64
        return {"tile_queries": 32 if few else 64, "tile_keys": keys, "warps": 8, "teams": 1, "stages": 2}
    if arch_number(arch) < 80 or depth > 64:
        keys = 32 if arch_number(arch) < 80 and depth > 80 else 64
        return {"tile_queries": 64, "tile_keys": keys, "warps": 4, "teams": 1, "stages": 2}
    few = blocks(128) < 264
    grouped = arch_number(arch) == 90 and depth == 64  # wgmma, which needs four warps
    return {
        "tile_queries": 64 if few or grouped else 128,
        "tile_keys": 64,
        "warps": 4,
        "teams": 2 if few else 1,
        "stages": 3 if few and grouped else 2,
    }


def flash_invariant(depth: int, dtype: str, arch: str) -> Tunables:
    """Return the defaults for few rows, for every number of rows: step size and teams decide the order of a query's
    sums."""
    return flash_defaults(depth, lambda _tile_queries: 0, dtype, arch)


def flash_launch(blocks: int, depth: int, tunables: Tunables, dtype: str) -> Launch:
    """Return a launch of `blocks` blocks, each with shared memory for its queries and for keys and values in flight."""
    size, queries, keys = DTYPE_BYTES[dtype], tunables["tile_queries"], tunables["tile_keys"]
    row = -(-depth // 16) * 16 * size + 16
    if dtype == "fp32":
        shared = (queries + 2 * keys) * row + queries * (keys * size + 16)
    else:
        # After the tiles are no longer needed: softmax and output fragments of each query, for every other team.
        merged = (tunables["teams"] - 1) * queries * 4 * (8 + -(-depth // 16) * 16)
        shared = max((queries + tunables["teams"] * tunables["stages"] * 2 * keys) * row, merged)
    teams = tunables["teams"]
    return Launch(blocks, tunables["warps"] * teams * THREADS_PER_WARP, shared, teams=teams)


def _flash_blocks(dims: Dims, tile_queries: int) -> int:
    return dims["batch"] * dims["heads"] * -(-dims["queries"] // tile_queries)


def _pairs(dims: Dims) -> int:
    """Return the number of query and key pairs that see each other, with every sequence full."""
    queries, keys, window = dims["queries"], dims["keys"], dims.get("window", 0)
    return sum(min(position + 1, window or keys) for position in range(keys - queries, keys))


def _prefill(batch: int, heads: int, queries: int, keys: int | None = None, depth: int = 64, window: int = 0) -> Dims:
    dims = {"batch": batch, "heads": heads, "queries": queries, "keys": keys or queries, "depth": depth}
    return dims | ({"window": window} if window else {})


FLASH_ATTENTION = KernelSpec(
    name="flash_attention",
    summary="causal attention of many queries, ragged and windowed, scores never stored",
    header="ops/flash_attention.cuh",
    awaits=True,
    arguments=(
        views("q", "batch heads queries depth"),
        views("k", "batch heads keys depth"),
        views("v", "batch heads keys depth"),
        reads("length", "batch", count_of("keys")),
        writes("y", "batch queries heads depth"),
        Scalar("batch"),
        Scalar("heads"),
        Scalar("queries"),
        Scalar("keys"),
        Scalar("window", 0),
        Scalar("scale", lambda dims: dims["depth"] ** -0.5),
    ),
    constants=("depth",),
    tunables=FLASH_TUNABLES,
    default=lambda dims, dtype, arch: flash_defaults(
        dims["depth"], lambda tile_queries: _flash_blocks(dims, tile_queries), dtype, arch
    ),
    allows=flash_allows,
    launch=lambda dims, tunables, dtype: flash_launch(
        _flash_blocks(dims, tunables["tile_queries"]), dims["depth"], tunables, dtype
    ),
    flops=lambda dims: 4 * dims["batch"] * dims["heads"] * dims["depth"] * _pairs(dims),
    reference=_attention,
    peers={"SDPA": _sdpa, "three kernels": _plain},
    test_dims=(
        *(_prefill(1, 2, queries) for queries in (1, 2, 3, 63, 64, 65, 127, 128, 129, 1023, 1024)),
        *(_prefill(batch, 3, 70) for batch in range(2, 10)),
        _prefill(2, 12, 257),
        _prefill(24, 12, 200),
        *(_prefill(3, 2, 5, keys) for keys in (5, 6, 64, 65, 200)),
        *(_prefill(2, 2, 200, window=window) for window in (1, 2, 63, 64, 65, 150, 500)),
        _prefill(2, 2, 70, 300, window=33),
        *(_prefill(2, 2, 100, depth=depth) for depth in (1, 3, 16, 24, 32, 63, 80, 96, 128)),
    ),
    bench_dims=(
        *(_prefill(1, 12, queries) for queries in (64, 128, 256, 512, 1024)),
        _prefill(16, 12, 1024),
        _prefill(16, 12, 1024, window=256),
    ),
)


def _decode_defaults(dims: Dims, dtype: str, _arch: str) -> Tunables:
    """Return enough parts that a few hundred blocks read, but none of only a few dozen keys. Few blocks have many keys
    in flight each; for many short contexts blocks are small."""
    rows, positions = dims["batch"] * dims["heads"], dims["positions"]
    splits = next((n for n in (1, 2, 4, 8) if rows * n >= 256 or positions <= 128 * n), 16)
    unroll = 4 if rows * splits < 256 and dtype != "fp32" else 2
    warps = 8 if rows < 256 or positions > 256 else 4 if rows < 1536 else 1
    return {"warps": warps, "unroll": unroll, "splits": splits, "part": 0}


#: Positions of a part that must not depend on the batch, and the possible numbers of parts.
_FIXED_PART, _SPLITS = 256, (1, 2, 4, 8, 16)


def _decode_invariant(dims: Dims, _dtype: str, _arch: str) -> Tunables:
    splits = next((n for n in _SPLITS if dims["positions"] <= n * _FIXED_PART), _SPLITS[-1])
    return {"warps": 4, "unroll": 2, "splits": splits, "part": _FIXED_PART}


def _decode_launch(dims: Dims, tunables: Tunables, _dtype: str) -> Launch:
    grid = dims["batch"] * dims["heads"] * tunables["splits"]
    return Launch(grid, tunables["warps"] * THREADS_PER_WARP)


def _coded_defaults(dims: Dims, dtype: str, arch: str) -> Tunables:
    """Return defaults for codes: a key has half the bytes, so twice as many are in flight, in smaller blocks."""
    tunables = _decode_defaults(dims, dtype, arch)
    warps = min(tunables["warps"], 4)
    at_once = 8 * warps  # for heads of 64, 16 bytes per lane
    return {**tunables, "warps": warps, "unroll": 4} if dims["positions"] > 2 * at_once else tunables


def _coded_blocks(dims: Dims, tunables: Tunables, dtype: str) -> int:
    """Return the blocks per multiprocessor for the compiler. To expand codes it takes twice the registers that it
    needs, which would halve the loads in flight; with so few threads per multiprocessor no registers spill."""
    if tunables["unroll"] > 4:
        return 1
    tensor = dtype == "fp16" and dims["depth"] == 64  # the sums of tensor cores take many registers
    roomy = not tensor and tunables["splits"] == 1 and dtype != "fp32"
    threads = 384 if tunables["unroll"] == 4 else 768 if roomy else 512
    return max(1, threads // (tunables["warps"] * THREADS_PER_WARP))


def _cached(batch: int, heads: int, positions: int, depth: int = 64, window: int = 0) -> Dims:
    dims = {"batch": batch, "heads": heads, "positions": positions, "depth": depth}
    return dims | ({"window": window} if window else {})


def _decode(q: Tensor, k: Tensor, v: Tensor, length: Tensor, window: int, scale: float) -> tuple[Tensor, ...]:
    import torch

    position = torch.arange(k.shape[2], device=q.device)
    seen = position < length[:, None]
    if window > 0:
        seen &= position >= length[:, None] - window
    scores = (q @ k.transpose(-2, -1) * scale).masked_fill(~seen[:, None, None], -torch.inf)
    return ((scores.softmax(dim=-1) @ v).transpose(1, 2),)


def _append(
    q: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    k: Tensor,
    v: Tensor,
    length: Tensor,
    lanes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, ...]:
    k, v, newest = k.clone(), v.clone(), length[lanes] - 1
    k[lanes, :, newest] = new_k[:, :, 0]
    v[lanes, :, newest] = new_v[:, :, 0]
    return *_decode(q, k[lanes], v[lanes], length[lanes], window, scale), k, v


def _append_codes(
    q: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    length: Tensor,
    lanes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, ...]:
    import torch

    from warpline.codes import decode, encode

    (new_k, k_scale), (new_v, v_scale) = encode(new_k), encode(new_v)
    k, v, scales, newest = k.clone(), v.clone(), scales.clone(), length[lanes] - 1
    for kept, new in ((k, new_k), (v, new_v), (scales, torch.cat([k_scale, v_scale], -1).to(scales.dtype))):
        kept[lanes, :, newest] = new[:, :, 0]
    keys, values = (decode(c[lanes], scales[lanes, ..., i : i + 1]) for i, c in enumerate((k, v)))
    return *_decode(q, keys, values, length[lanes], window, scale), k, v, scales


def _decode_op(name: str, summary: str, *, appends: bool, coded: bool = False) -> KernelSpec:
    new, cached = "batch heads 1 depth", "batch heads positions depth"
    cache, fresh, kept = "slots heads positions depth", TO_CODES if coded else STORAGE, CODES if coded else STORAGE
    pairs = updates("scales", "slots heads positions 2", SCALES, touched="batch heads positions 2", strided=True)

    def slotted(dims: Dims) -> Dims:
        return {**dims, "slots": dims["batch"] + 2} if appends else dims

    shapes = [
        *(_cached(2, 2, positions) for positions in (1, 2, 3, 63, 64, 65, 127, 128, 129, 1023, 1024)),
        *(_cached(batch, 3, 100) for batch in range(1, 10)),
        _cached(64, 12, 100),
        *(_cached(3, 2, 300, window=window) for window in (1, 2, 63, 65, 299, 1000)),
        *(_cached(2, 2, 300, depth=depth) for depth in (1, 3, 16, 24, 32, 63, 80, 96, 128)),
    ]
    timed = [
        *(_cached(batch, 12, positions) for batch in (1, 8, 64) for positions in (128, 1024)),
        _cached(256, 12, 128),
    ]
    return KernelSpec(
        name=name,
        summary=summary,
        header="ops/decode_attention.cuh",
        awaits=True,
        function="decode_attention",
        arguments=(
            views("q", new),
            views("new_k", new, fresh) if appends else Absent("new_k", "{}"),
            views("new_v", new, fresh) if appends else Absent("new_v", "{}"),
            updates("k", cache, kept, touched=cached, strided=True) if appends else views("k", cached),
            updates("v", cache, kept, touched=cached, strided=True) if appends else views("v", cached),
            pairs if coded else Absent("scales", "{}"),
            reads("length", "slots" if appends else "batch", count_of("positions"), touched="batch"),
            reads("lanes", "batch", distinct("batch", "slots")) if appends else Absent("lanes"),
            writes("y", "batch 1 heads depth"),
            scratch("parts", "batch heads splits depth+2"),
            scratch("finished", "batch heads", BITS),
            Scalar("heads"),
            Scalar("positions"),
            Scalar("window", 0),
            Scalar("scale", lambda dims: dims["depth"] ** -0.5),
        ),
        constants=("depth",),
        tunables={"warps": (4, 1, 2, 8), "unroll": (4, 2, 8), "splits": _SPLITS, "part": (0, _FIXED_PART)},
        default=_coded_defaults if coded else _decode_defaults,
        invariant=_decode_invariant,
        launch=_decode_launch,
        min_blocks=_coded_blocks if coded else lambda _dims, _tunables, _dtype: 1,
        flops=lambda dims: (
            4
            * dims["batch"]
            * dims["heads"]
            * dims["depth"]
            * min(dims.get("window", 0) or dims["positions"], dims["positions"])
        ),
        reference=_append_codes if coded else _append if appends else _decode,
        peers={} if appends else {"SDPA": _sdpa, "three kernels": _plain},
        test_dims=tuple(slotted(dims) for dims in shapes),
        bench_dims=tuple(slotted(dims) for dims in timed),
    )


DECODE_ATTENTION = _decode_op(
    "decode_attention",
    "attention of one new query per sequence over the KV cache, split where it is long",
    appends=False,
)
APPEND_ATTENTION = _decode_op(
    "append_attention",
    "decode_attention for any slots of the cache, which also stores the new key and value",
    appends=True,
)
APPEND_ATTENTION_INT8 = _decode_op(
    "append_attention_int8",
    "append_attention over a cache of int8 codes, to which the new key and value are rounded first",
    appends=True,
    coded=True,
)
