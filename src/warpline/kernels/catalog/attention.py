"""Attention: of many queries at once, and of one new query over the KV cache."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from warpline.config import DTYPE_BYTES
from warpline.hardware import arch_number
from warpline.kernels.arguments import BITS, Absent, Dims, Scalar, count_of, reads, scratch, updates, views, writes
from warpline.kernels.spec import THREADS_PER_WARP, KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    import torch
    from torch import Tensor


#: Of a block of attention: with more, a thread would have fewer registers than its part of the output needs.
MOST_WARPS = 16


def _attention(q: Tensor, k: Tensor, v: Tensor, length: Tensor, window: int, scale: float) -> tuple[Tensor, ...]:
    """The queries are at the last of the keys' positions, but only those below `length` exist."""
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
    """torch's FlashAttention in half precision without a window, which it does not know; what it chooses otherwise."""
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
    """Three kernels: scores with the mask added, softmax, values."""
    import torch

    mask = _mask(q.shape[2], k.shape[2], window, q.dtype, q.device)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1), alpha=scale)
    return scores.softmax(dim=-1) @ v.flatten(0, 1)


@functools.lru_cache(maxsize=8)
def _mask(queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a query sees a key, -inf where it does not: [1, queries, keys]."""
    import torch

    hidden = ~torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if window > 0:
        hidden |= torch.ones_like(hidden).tril(keys - queries - window)
    return torch.zeros(1, queries, keys, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)


def _flash_allows(_dims: Dims, tunables: Tunables, dtype: str) -> bool:
    """Each warp has 16 queries or a multiple; in fp32 a tile is dealt to 16 x 16 threads."""
    queries, warps, teams = (tunables[n] for n in ("tile_queries", "warps", "teams"))
    if dtype == "fp32":
        return warps == 8 and teams == 1
    return queries % (16 * warps) == 0 and warps * teams <= MOST_WARPS


def _flash_defaults(dims: Dims, dtype: str, arch: str) -> Tunables:
    heads = dims["batch"] * dims["heads"]
    if dtype == "fp32":
        roomy = arch_number(arch) in (80, 90, 100) and dims["depth"] <= 64
        few = dims["depth"] > 64 or heads * -(-dims["queries"] // 64) < (132 if roomy else 264)
        # Shared memory decides how many keys: less on Turing, twice as much for each where heads are large.
        keys = 128 if roomy else 32 if dims["depth"] > 64 or (not few and arch_number(arch) < 80) else 64
        return {"tile_queries": 32 if few else 64, "tile_keys": keys, "warps": 8, "teams": 1, "stages": 2}
    if arch_number(arch) < 80 or dims["depth"] > 64:
        keys = 32 if arch_number(arch) < 80 and dims["depth"] > 80 else 64
        return {"tile_queries": 64, "tile_keys": keys, "warps": 4, "teams": 1, "stages": 2}
    few = heads * -(-dims["queries"] // 128) < 264
    grouped = arch_number(arch) == 90 and dims["depth"] == 64  # four warps multiply together there
    return {
        "tile_queries": 64 if few or grouped else 128,
        "tile_keys": 64,
        "warps": 4,
        "teams": 2 if few else 1,
        "stages": 3 if few and grouped else 2,
    }


def _flash_launch(dims: Dims, tunables: Tunables, dtype: str) -> Launch:
    size, queries, keys = DTYPE_BYTES[dtype], tunables["tile_queries"], tunables["tile_keys"]
    row = -(-dims["depth"] // 16) * 16 * size + 16
    grid = dims["batch"] * dims["heads"] * -(-dims["queries"] // queries)
    if dtype == "fp32":
        shared = (queries + 2 * keys) * row + queries * (keys * size + 16)
    else:
        # Of each query and other team the softmax and the output, in fragments, behind what all of them read.
        merged = (tunables["teams"] - 1) * queries * 4 * (8 + -(-dims["depth"] // 16) * 16)
        shared = max((queries + tunables["teams"] * tunables["stages"] * 2 * keys) * row, merged)
    teams = tunables["teams"]
    return Launch(grid, tunables["warps"] * teams * THREADS_PER_WARP, shared, teams=teams)


def _pairs(dims: Dims) -> int:
    """Query and key pairs that see each other, with every sequence full."""
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
        Absent("cache_k", "{}"),
        Absent("cache_v", "{}"),
        writes("y", "batch queries heads depth"),
        Scalar("batch"),
        Scalar("heads"),
        Scalar("queries"),
        Scalar("keys"),
        Scalar("window", 0),
        Scalar("scale", lambda dims: dims["depth"] ** -0.5),
    ),
    constants=("depth",),
    tunables={
        "tile_queries": (64, 32, 128),
        "tile_keys": (64, 32, 128),
        "warps": (4, 2, 8),
        "teams": (1, 2, 4),
        "stages": (2, 3),
    },
    default=_flash_defaults,
    allows=_flash_allows,
    launch=_flash_launch,
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


def _prompt(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, cache_k: Tensor, cache_v: Tensor, window: int, scale: float
) -> tuple[Tensor, ...]:
    import torch

    cache_k, cache_v, tokens = cache_k.clone(), cache_v.clone(), k.shape[2]
    exists = (torch.arange(tokens, device=k.device) < length[:, None])[:, None, :, None]
    for cache, new in ((cache_k, k), (cache_v, v)):
        cache[:, :, :tokens] = torch.where(exists, new, cache[:, :, :tokens])
    return *_attention(q, k, v, length, window, scale), cache_k, cache_v


def _cached_prompt(batch: int, heads: int, queries: int, slots: int, depth: int = 64, window: int = 0) -> Dims:
    dims = {"batch": batch, "heads": heads, "queries": queries, "slots": slots, "depth": depth}
    return dims | ({"window": window} if window else {})


PROMPT_ATTENTION = KernelSpec(
    name="prompt_attention",
    summary="the same of whole prompts, with their keys and values put into the KV cache on the way",
    header="ops/flash_attention.cuh",
    awaits=True,
    function="flash_attention",
    arguments=(
        views("q", "batch heads queries depth"),
        views("k", "batch heads queries depth"),
        views("v", "batch heads queries depth"),
        reads("length", "batch", count_of("queries")),
        updates("cache_k", "batch heads slots depth", strided=True),
        updates("cache_v", "batch heads slots depth", strided=True),
        writes("y", "batch queries heads depth"),
        Scalar("batch"),
        Scalar("heads"),
        Scalar("queries"),
        Absent("keys", "queries"),
        Scalar("window", 0),
        Scalar("scale", lambda dims: dims["depth"] ** -0.5),
    ),
    constants=("depth",),
    tunables=FLASH_ATTENTION.tunables,
    default=_flash_defaults,
    allows=_flash_allows,
    launch=_flash_launch,
    flops=lambda dims: 4 * dims["batch"] * dims["heads"] * dims["depth"] * _pairs({**dims, "keys": dims["queries"]}),
    reference=_prompt,
    test_dims=(
        *(_cached_prompt(batch, 3, 33, 40) for batch in range(1, 10)),
        *(_cached_prompt(2, 2, queries, 1024) for queries in (1, 2, 65, 1023, 1024)),
        *(_cached_prompt(2, 2, 7, 9, depth) for depth in (1, 3, 16, 24, 63, 80)),
        _cached_prompt(2, 2, 200, 256, window=65),
    ),
    bench_dims=(
        _cached_prompt(1, 12, 128, 128),
        _cached_prompt(1, 12, 1024, 1024),
        _cached_prompt(16, 12, 1024, 1024),
    ),
)


def _decode_defaults(dims: Dims, dtype: str, _arch: str) -> Tunables:
    """Parts enough that a few hundred blocks read, but none of only a few dozen keys. Few blocks have many keys on
    their way each; many blocks of short contexts are small ones."""
    rows, slots = dims["batch"] * dims["heads"], dims["slots"]
    splits = next((n for n in (1, 2, 4, 8) if rows * n >= 256 or slots <= 128 * n), 16)
    unroll = 4 if rows * splits < 256 and dtype != "fp32" else 2
    warps = 8 if rows < 256 or slots > 256 else 4 if rows < 1536 else 1
    return {"warps": warps, "unroll": unroll, "splits": splits}


def _decode_launch(dims: Dims, tunables: Tunables, _dtype: str) -> Launch:
    grid = dims["batch"] * dims["heads"] * tunables["splits"]
    return Launch(grid, tunables["warps"] * THREADS_PER_WARP)


def _cached(batch: int, heads: int, slots: int, depth: int = 64, window: int = 0) -> Dims:
    dims = {"batch": batch, "heads": heads, "slots": slots, "depth": depth}
    return dims | ({"window": window} if window else {})


def _decode(q: Tensor, k: Tensor, v: Tensor, length: Tensor, window: int, scale: float) -> tuple[Tensor, ...]:
    import torch

    slot = torch.arange(k.shape[2], device=q.device)
    seen = slot < length[:, None]
    if window > 0:
        seen &= slot >= length[:, None] - window
    scores = (q @ k.transpose(-2, -1) * scale).masked_fill(~seen[:, None, None], -torch.inf)
    return ((scores.softmax(dim=-1) @ v).transpose(1, 2),)


def _append(
    q: Tensor, new_k: Tensor, new_v: Tensor, k: Tensor, v: Tensor, length: Tensor, window: int, scale: float
) -> tuple[Tensor, ...]:
    import torch

    row = torch.arange(len(q), device=q.device)
    k, v = k.clone(), v.clone()
    k[row, :, length - 1] = new_k[:, :, 0]
    v[row, :, length - 1] = new_v[:, :, 0]
    return *_decode(q, k, v, length, window, scale), k, v


def _decode_op(name: str, summary: str, *, appends: bool) -> KernelSpec:
    new = "batch heads 1 depth"
    cache = "batch heads slots depth"
    return KernelSpec(
        name=name,
        summary=summary,
        header="ops/decode_attention.cuh",
        awaits=True,
        function="decode_attention",
        arguments=(
            views("q", new),
            views("new_k", new) if appends else Absent("new_k", "{}"),
            views("new_v", new) if appends else Absent("new_v", "{}"),
            updates("k", cache, strided=True) if appends else views("k", cache),
            updates("v", cache, strided=True) if appends else views("v", cache),
            reads("length", "batch", count_of("slots")),
            writes("y", "batch 1 heads depth"),
            scratch("parts", "batch heads splits depth+2"),
            scratch("finished", "batch heads", BITS),
            Scalar("heads"),
            Scalar("slots"),
            Scalar("window", 0),
            Scalar("scale", lambda dims: dims["depth"] ** -0.5),
        ),
        constants=("depth",),
        tunables={"warps": (4, 1, 2, 8), "unroll": (4, 2, 8), "splits": (1, 2, 4, 8, 16)},
        default=_decode_defaults,
        launch=_decode_launch,
        flops=lambda dims: (
            4
            * dims["batch"]
            * dims["heads"]
            * dims["depth"]
            * min(dims.get("window", 0) or dims["slots"], dims["slots"])
        ),
        reference=_append if appends else _decode,
        peers={} if appends else {"SDPA": _sdpa, "three kernels": _plain},
        test_dims=(
            *(_cached(2, 2, slots) for slots in (1, 2, 3, 63, 64, 65, 127, 128, 129, 1023, 1024)),
            *(_cached(batch, 3, 100) for batch in range(1, 10)),
            _cached(64, 12, 100),
            *(_cached(3, 2, 300, window=window) for window in (1, 2, 63, 65, 299, 1000)),
            *(_cached(2, 2, 300, depth=depth) for depth in (1, 3, 16, 24, 32, 63, 80, 96, 128)),
        ),
        bench_dims=(
            *(_cached(batch, 12, slots) for batch in (1, 8, 64) for slots in (128, 1024)),
            _cached(256, 12, 128),
        ),
    )


DECODE_ATTENTION = _decode_op(
    "decode_attention",
    "attention of one new query per sequence over the KV cache, split where it is long",
    appends=False,
)
APPEND_ATTENTION = _decode_op(
    "append_attention",
    "the same, with the new key and value put into the cache on the way",
    appends=True,
)
