"""Packed prompts: the table for a launch, and attention that is independent of how rows were packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from warpline.kernels.arguments import Dims
from warpline.kernels.catalog import find
from warpline.kernels.catalog.prompts import prompt_tiles
from warpline.kernels.spec import Variant
from warpline.kernels.verify import made_for, random_inputs

PROMPT = find("prompt_attention")
LANES = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), max_size=30)  # start and count of each


def packed(lanes: list[tuple[int, int]], slots: list[int] | None = None) -> np.ndarray:
    """Return lanes one after the other, in slots independent of their order."""
    starts, counts = np.array(lanes, np.int64).reshape(-1, 2).T
    chosen = np.arange(len(lanes))[::-1] * 7 % 31 if slots is None else slots
    return np.stack([chosen, starts, np.cumsum(counts) - counts, counts], axis=1)


def tiles_of(spans: np.ndarray, tile_queries: int) -> np.ndarray:
    slot, start, row, count = spans.T
    return prompt_tiles(slot, start, row, count, tile_queries)


@given(LANES, st.sampled_from([32, 64, 128]))
def test_a_table_has_every_row_once_and_begins_with_what_takes_longest(
    lanes: list[tuple[int, int]], tile_queries: int
) -> None:
    spans = packed(lanes)
    table = tiles_of(spans, tile_queries)
    assert table.dtype == np.int32
    assert table.shape == (sum(-(-count // tile_queries) for _, count in lanes), 8)
    rows: list[int] = []
    for slot, start, row, first, count, *rest in table.tolist():
        assert [slot, start, row, count] in spans.tolist()
        assert rest == [0, 0, 0]
        assert first % tile_queries == 0
        rows += range(row + first, row + min(first + tile_queries, count))
    assert sorted(rows) == list(range(sum(count for _, count in lanes)))
    ends = table[:, 1] + table[:, 3]
    assert (np.diff(ends) <= 0).all()
    for end in set(ends.tolist()):  # among those of equal time the lanes' order is kept
        assert (np.diff(table[ends == end, 2]) >= 0).all()


def test_no_lanes_are_no_tiles() -> None:
    assert tiles_of(np.zeros((0, 4), np.int64), 64).shape == (0, 8)


def causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend in one sequence [heads, length, depth], query by query."""
    out = torch.zeros_like(q)
    for i in range(q.shape[1]):
        seen = slice(max(0, i + 1 - window) if window else 0, i + 1)
        weights = (k[:, seen] @ q[:, i, :, None] * q.shape[-1] ** -0.5).softmax(dim=1)
        out[:, i] = (weights * v[:, seen]).sum(dim=1)
    return out


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("chunk", [100, 1, 4])
def test_sequences_do_not_know_of_each_other_nor_of_chunks(chunk: int, window: int) -> None:
    """Three sequences, in passes of up to `chunk` tokens each, beside each other and in any slots."""
    heads, depth, lengths, slots = 2, 3, [11, 4, 7], [2, 5, 0]
    torch.manual_seed(3)
    q, k, v = (torch.randn(3, heads, 11, depth, dtype=torch.float64) for _ in range(3))
    cache_k, cache_v = (torch.full((6, heads, 12, depth), torch.nan, dtype=torch.float64) for _ in range(2))
    before = cache_k.clone()
    found = torch.zeros_like(q)
    for start in range(0, max(lengths), chunk):
        these = [i for i, length in enumerate(lengths) if length > start]
        counts = [min(chunk, lengths[i] - start) for i in these]
        rows = [t[i, :, start : start + n] for t in (q, k, v) for i, n in zip(these, counts, strict=True)]
        joined = [torch.cat(rows[at : at + len(these)], dim=1)[None] for at in (0, len(these), 2 * len(these))]
        spans = packed([(start, count) for count in counts], [slots[i] for i in these])
        tiles = torch.from_numpy(tiles_of(spans, 2))  # tiles of any size
        y, cache_k, cache_v = PROMPT.reference(*joined, tiles, cache_k, cache_v, window=window, scale=depth**-0.5)
        for i, (_, _, row, count) in zip(these, spans.tolist(), strict=True):
            found[i, :, start : start + count] = y[0, row : row + count].transpose(0, 1)
    for i, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        alone = causal(q[i, :, :length], k[i, :, :length], v[i, :, :length], window)
        assert torch.allclose(found[i, :, :length], alone)
        assert torch.equal(cache_k[slot, :, :length], k[i, :, :length])
        assert torch.equal(cache_v[slot, :, :length], v[i, :, :length])
        before[slot, :, :length] = k[i, :, :length]
    assert torch.equal(cache_k.nan_to_num(7), before.nan_to_num(7))  # nothing else was changed


@pytest.mark.parametrize("dims", [dims for dims in PROMPT.test_dims if dims["rows"] <= 300], ids=str)
def test_random_tables_are_whole(dims: Dims) -> None:
    """Distinct slots, no more keys than a slot holds, every row; other tiles belong to the same sequences."""
    small = random_inputs(PROMPT, "fp16", dims, 5, "cpu", tunables={"tile_queries": 32})
    large = made_for(PROMPT, small, {"tile_queries": 128}, dims, 5)
    begun = [t[3][(t[3][:, 3] == 0) & (t[3][:, 4] > 0)][:, :5] for t in (small, large)]
    assert torch.equal(*(spans[spans[:, 2].argsort()] for spans in begun))
    assert small[3][-1].tolist() == [0] * 8  # an entry that only fills the table
    slot, start, _, _, count = begun[0].T
    assert len(set(slot.tolist())) == dims["lanes"] <= dims["slots"]
    assert (start + count <= dims["positions"]).all()
    assert count.sum() == dims["rows"]
    assert len(small[3]) <= dims["tiles"] + 1
    assert PROMPT.dims_of([t.shape for t in small])["tiles"] == len(small[3])


def test_some_sequences_have_a_past() -> None:
    dims = next(dims for dims in PROMPT.test_dims if dims["lanes"] > 8)
    starts = random_inputs(PROMPT, "fp16", dims, 1, "cpu")[3][:-1, 1]
    assert 0 < (starts > 0).sum() < len(starts)


@pytest.mark.parametrize("past", [0, 5])
def test_torchs_own_attention_does_the_same_where_it_is_timed(past: int) -> None:
    dims = {"lanes": 3, "heads": 2, "rows": 21, "slots": 3, "positions": 7 + past, "depth": 8, "past": past, "tiles": 9}
    inputs = random_inputs(PROMPT, "fp32", dims, 2, "cpu", full=True)
    assert (inputs[3][:, 1] == past).all()
    exact = PROMPT.reference(*inputs, window=0, scale=0.3)
    for ours, theirs in zip(exact, PROMPT.peers["SDPA"](*inputs, window=0, scale=0.3), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_tunables_are_known_before_the_table(arch: str, dtype: str) -> None:
    for rows in (1, 100, 1000, 20000):
        few = {"heads": 12, "rows": rows, "depth": 64}
        whole = {**few, "tiles": 77, "slots": 9, "positions": 1024}
        tunables = PROMPT.default(few, dtype, arch)
        assert tunables == PROMPT.default(whole, dtype, arch)
        assert Variant.of(PROMPT, dtype, whole, arch, tunables).launch(whole).grid == 77 * 12
