"""Attention of prompts: packed rows of many sequences in one launch, after what their caches already hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from warpline.kernels.arguments import (
    CODES,
    SCALES,
    TO_CODES,
    Absent,
    Dims,
    Scalar,
    Values,
    reads,
    updates,
    views,
    writes,
)
from warpline.kernels.catalog.attention import (
    FLASH_TUNABLES,
    flash_allows,
    flash_defaults,
    flash_invariant,
    flash_launch,
)
from warpline.kernels.spec import KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

#: Numbers per entry of the table of tiles; the last three are 0.
ENTRY = 8


def prompt_tiles(
    slot: np.ndarray, start: np.ndarray, row: np.ndarray, count: np.ndarray, tile_queries: int
) -> np.ndarray:
    """Return the table of tiles, int32 [tiles, 8], for the new tokens of n slots: `count` tokens at the positions of
    `slot` from `start` on, in packed rows from `row` on. An entry is (slot, start, row, first, count, 0, 0, 0), for
    `tile_queries` tokens from `first` on. Entries that see the most keys take the longest and come first."""
    import numpy as np

    tiles = -(-count // tile_queries)
    behind = tiles.cumsum()
    lane = np.arange(len(tiles)).repeat(tiles)
    first = (np.arange(len(lane)) - (behind - tiles)[lane]) * tile_queries
    order = np.argsort(-(start[lane] + first), kind="stable")
    lane, table = lane[order], np.zeros((len(lane), ENTRY), np.int32)
    for column, values in enumerate((slot[lane], start[lane], row[lane], first[order], count[lane])):
        table[:, column] = values
    return table


def _table(dims: Dims, generator: torch.Generator, full: bool) -> Tensor:
    """Make a test table for `lanes` sequences with up to `past` cached tokens: of any lengths, in any slots, half of
    them without a past, and with an entry that only pads the table; or for `full` all equal and in order."""
    import numpy as np
    import torch

    lanes, rows, past = dims["lanes"], dims["rows"], dims.get("past", 0)

    def draw(highest: int | Tensor) -> Tensor:
        """Draw integers from 0 to `highest`, inclusive."""
        return (torch.rand(lanes, generator=generator) * (torch.as_tensor(highest) + 1)).long()

    slot, ends = torch.arange(lanes), rows * torch.arange(1, lanes + 1) // lanes
    if not full:
        slot = torch.randperm(dims["slots"], generator=generator)[:lanes]
        ends = torch.cat([torch.randperm(rows - 1, generator=generator)[: lanes - 1].sort().values + 1, ends[-1:]])
    count = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))
    most = (dims["positions"] - count).clamp(max=past)
    start = most if full else draw(most) * draw(1)
    row = ends - count
    table = prompt_tiles(slot.numpy(), start.numpy(), row.numpy(), count.numpy(), dims["tile_queries"])
    return torch.from_numpy(table if full else np.concatenate([table, np.zeros_like(table[:1])]))


def _attend(
    q: Tensor, tiles: Tensor, seen: Callable[[int, int, slice], tuple[Tensor, Tensor]], window: int, scale: float
) -> Tensor:
    """Attend to each sequence on its own. `seen` returns the keys and values of a slot, for new tokens from a position
    on that are in some of the rows."""
    import torch

    y = torch.zeros_like(q)
    spans = tiles[(tiles[:, 3] == 0) & (tiles[:, 4] > 0)]
    for slot, start, row, _, count, *_ in spans.tolist():
        new = slice(row, row + count)
        keys, values = seen(slot, start, new)
        key = torch.arange(start + count, device=q.device)
        position = key[start:, None]
        hidden = key > position
        if window > 0:
            hidden |= key <= position - window
        scores = (q[0, :, new] @ keys.transpose(-2, -1) * scale).masked_fill(hidden, -torch.inf)
        y[0, :, new] = scores.softmax(dim=-1) @ values
    return y.transpose(1, 2)


def _prompt(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, cache_k: Tensor, cache_v: Tensor, window: int, scale: float
) -> tuple[Tensor, ...]:
    """Reference: attend to the cache, after the new keys and values have been stored in it."""
    cache_k, cache_v = cache_k.clone(), cache_v.clone()

    def seen(slot: int, start: int, new: slice) -> tuple[Tensor, Tensor]:
        end = start + new.stop - new.start
        cache_k[slot, :, start:end], cache_v[slot, :, start:end] = k[0, :, new], v[0, :, new]
        return cache_k[slot, :, :end], cache_v[slot, :, :end]

    return _attend(q, tiles, seen, window, scale), cache_k, cache_v


def _prompt_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    scales: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Reference: attend to the expanded older codes, and to the new keys and values as they are."""
    import torch

    from warpline.codes import decode

    def seen(slot: int, start: int, new: slice) -> tuple[Tensor, Tensor]:
        older = [
            decode(c[slot, :, :start], scales[slot, :, :start, i : i + 1]) for i, c in enumerate((cache_k, cache_v))
        ]
        keys, values = (torch.cat([old, x[0, :, new]], dim=1) for old, x in zip(older, (k, v), strict=True))
        return keys, values

    return (_attend(q, tiles, seen, window, scale),)


def _quantise(
    k: Tensor,
    v: Tensor,
    row_slots: Tensor,
    row_positions: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    scales: Tensor,
) -> tuple[Tensor, ...]:
    from warpline.codes import decode, encode

    caches, scales, rounded = (cache_k.clone(), cache_v.clone()), scales.clone(), []
    for i, (new, cache) in enumerate(zip((k, v), caches, strict=True)):
        codes, scale = encode(new[0])  # [heads, rows, depth]
        cache[row_slots, :, row_positions] = codes.transpose(0, 1)
        scales[row_slots, :, row_positions, i] = scale[..., 0].T.to(scales.dtype)
        rounded.append(decode(codes, scale)[None].to(new.dtype))
    return *rounded, *caches, scales


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, _tiles: Tensor, cache_k: Tensor, cache_v: Tensor, window: int, scale: float
) -> tuple[Tensor, ...]:
    """Attention by torch, for equal lanes that fill their slots, so that shapes suffice."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention as attend

    assert window <= 0  # it does not support a window
    lanes, count = len(cache_k), q.shape[2] // len(cache_k)
    q, k, v = (t[0].unflatten(1, (lanes, count)).transpose(0, 1) for t in (q, k, v))
    for cache, new in ((cache_k, k), (cache_v, v)):
        cache[:, :, -count:] = new
    past = cache_k.shape[2] > count
    mask = causal_lower_right(count, cache_k.shape[2]) if past else None
    y = attend(q, cache_k if past else k, cache_v if past else v, mask, is_causal=not past, scale=scale)
    return y.transpose(1, 2).flatten(0, 1)[None], cache_k, cache_v


def _sdpa_codes(*inputs: Tensor, window: int, scale: float) -> tuple[Tensor, ...]:
    """Attention by torch over the expanded codes."""
    from warpline.codes import decode

    q, k, v, tiles, *caches, scales = inputs
    keys, values = (decode(cache, scales[..., i : i + 1]).to(q.dtype) for i, cache in enumerate(caches))
    return _sdpa(q, k, v, tiles, keys, values, window, scale)[:1]


def _places(dims: Dims, generator: torch.Generator, full: bool) -> Tensor:
    """Draw a slot and a position for each row, all different; in order if `full`, which is timed."""
    import torch

    count = dims["slots"] * dims["positions"]
    found = torch.arange(dims["rows"]) if full else torch.randperm(count, generator=generator)[: dims["rows"]]
    return torch.stack([found // dims["positions"], found % dims["positions"]])


def _pairs(dims: Dims) -> int:
    """Return the number of query and key pairs that see each other, for equal lanes."""
    count, past, window = dims["rows"] // dims["lanes"], dims.get("past", 0), dims.get("window", 0)
    return dims["lanes"] * sum(min(position + 1, window or position + 1) for position in range(past, past + count))


def _defaults(dims: Dims, dtype: str, arch: str) -> Tunables:
    """Return defaults that depend on the rows only: the table is made after the tunables are chosen."""
    return flash_defaults(dims["depth"], lambda queries: dims["heads"] * -(-dims["rows"] // queries), dtype, arch)


def _packed(
    lanes: int, heads: int, rows: int, slots: int, positions: int, depth: int = 64, *, past: int = 0, window: int = 0
) -> Dims:
    """Return dimensions with the largest number of tiles, that of the smallest tile; the table says how many a launch
    has."""
    dims = {"lanes": lanes, "heads": heads, "rows": rows, "slots": slots, "positions": positions, "depth": depth}
    numbers = {"past": past, "window": window}
    tiles = rows // min(FLASH_TUNABLES["tile_queries"]) + lanes
    return dims | {"tiles": tiles} | {name: number for name, number in numbers.items() if number}


def _alike(lanes: int, heads: int, count: int, past: int = 0) -> Dims:
    """Return dimensions of lanes that fill their slots."""
    return _packed(lanes, heads, lanes * count, lanes, past + count, past=past)


def _prompt_op(name: str, summary: str, *, coded: bool = False) -> KernelSpec:
    cache, new = "slots heads positions depth", "1 heads rows depth"
    plain = [updates(n, cache, touched=new, strided=True) for n in ("cache_k", "cache_v")]
    codes = [views(n, cache, CODES, touched="0") for n in ("cache_k", "cache_v")]
    pairs = views("scales", "slots heads positions 2", SCALES, touched="0")
    return KernelSpec(
        name=name,
        summary=summary,
        header="ops/flash_attention.cuh",
        awaits=True,
        function="prompt_attention",
        arguments=(
            views("q", new),
            views("k", new),
            views("v", new),
            reads("tiles", f"tiles {ENTRY}", Values("int32", made=_table)),
            # The cache. It is written unless it holds codes; the table says how much is read.
            *(codes if coded else plain),
            pairs if coded else Absent("scales", "{}"),
            writes("y", "1 rows heads depth"),
            Scalar("heads"),
            Scalar("window", 0),
            Scalar("scale", lambda dims: dims["depth"] ** -0.5),
        ),
        constants=("depth",),
        tunables=FLASH_TUNABLES,
        default=_defaults,
        invariant=lambda dims, dtype, arch: flash_invariant(dims["depth"], dtype, arch),
        allows=flash_allows,
        launch=lambda dims, tunables, dtype: flash_launch(
            dims["tiles"] * dims["heads"], dims["depth"], tunables, dtype
        ),
        flops=lambda dims: 4 * dims["heads"] * dims["depth"] * _pairs(dims),
        reference=_prompt_codes if coded else _prompt,
        peers={"SDPA": _sdpa_codes if coded else _sdpa},
        test_dims=(
            *(_packed(lanes, 3, 33 * lanes, lanes + 2, 70 * lanes, past=40) for lanes in range(1, 10)),
            *(_packed(2, 2, rows, 3, 2100, past=past) for rows in (2, 65, 129, 2000) for past in (0, 1, 64, 65, 100)),
            *(_packed(2, 2, 14, 3, 40, depth, past=9) for depth in (1, 3, 16, 24, 32, 63, 80, 96, 128)),
            *(_packed(3, 2, 300, 4, 500, past=150, window=window) for window in (1, 2, 63, 64, 65, 150, 500)),
            _packed(40, 2, 41, 41, 300, past=200),
            _packed(24, 12, 1200, 26, 1300, past=100),
        ),
        bench_dims=(_alike(1, 12, 128), _alike(1, 12, 1024), _alike(16, 12, 1024), _alike(16, 12, 256, past=768)),
    )


PROMPT_ATTENTION = _prompt_op(
    "prompt_attention",
    "causal attention of packed prompts, also to cached positions; stores keys and values in the KV cache",
)
PROMPT_ATTENTION_INT8 = _prompt_op(
    "prompt_attention_int8",
    "causal attention of packed prompts, also to cached positions, with a KV cache of int8 codes",
    coded=True,
)


def _new_rows(rows: int, heads: int, depth: int = 64) -> Dims:
    return {"heads": heads, "rows": rows, "depth": depth, "slots": 3, "positions": -(-rows // 3) + 9}


_BLOCKS = (256, 128, 512)
#: Lanes that share a row of one head.
_LANES = 8

QUANTISE_KV = KernelSpec(
    name="quantise_kv",
    summary="stores new keys and values as int8 codes in the KV cache, and returns them rounded for attention",
    header="ops/quantise_kv.cuh",
    arguments=(
        updates("k", "1 heads rows depth", TO_CODES, strided=True),
        updates("v", "1 heads rows depth", TO_CODES, strided=True),
        reads("row_slots", "rows", Values("int64", made=lambda *drawn: _places(*drawn)[0])),
        reads("row_positions", "rows", Values("int64", made=lambda *drawn: _places(*drawn)[1])),
        updates("cache_k", "slots heads positions depth", CODES, touched="1 heads rows depth", strided=True),
        updates("cache_v", "slots heads positions depth", CODES, touched="1 heads rows depth", strided=True),
        updates("scales", "slots heads positions 2", SCALES, touched="1 heads rows 2", strided=True),
        Scalar("rows"),
        Scalar("heads"),
    ),
    constants=("depth",),
    options=(_LANES,),
    tunables={"block": _BLOCKS},
    default=lambda _dims, _dtype, _arch: {"block": 256},
    launch=lambda dims, tunables, _dtype: Launch(
        -(-dims["rows"] * dims["heads"] * _LANES // tunables["block"]), tunables["block"]
    ),
    flops=lambda dims: 8 * dims["heads"] * dims["rows"] * dims["depth"],
    reference=_quantise,
    test_dims=(
        *(_new_rows(rows, 3) for rows in (1, 2, 3, 9, 65, 300)),
        *(_new_rows(5, heads) for heads in (1, 2, 25)),
        *(_new_rows(7, 2, depth) for depth in (1, 2, 3, 16, 24, 32, 63, 80, 96, 127, 128)),
    ),
    bench_dims=(_new_rows(128, 12), _new_rows(1024, 12), _new_rows(16384, 12)),
)
