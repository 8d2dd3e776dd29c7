"""Ops of an int8 KV cache: their references compared with plain ones, their bytes, and the compiler's report."""

from __future__ import annotations

import pytest
import torch

from warpline.codes import decode, encode
from warpline.hardware import resident_blocks
from warpline.kernels.catalog import find
from warpline.kernels.compile import compile_many
from warpline.kernels.spec import KernelSpec, Variant
from warpline.kernels.verify import random_inputs

APPEND, PROMPT, QUANTISE = (find(name) for name in ("append_attention_int8", "prompt_attention_int8", "quantise_kv"))


@pytest.mark.parametrize("dims", APPEND.test_dims[::5], ids=str)
def test_a_step_is_the_plain_one_over_what_codes_mean(dims: dict[str, int]) -> None:
    q, new_k, new_v, k, v, scales, length, lanes = (
        t.double() if t.is_floating_point() else t for t in random_inputs(APPEND, "fp32", dims, 3, "cpu")
    )
    numbers = {"window": dims.get("window", 0), "scale": 0.3}
    y, k_after, v_after, scales_after = APPEND.reference(q, new_k, new_v, k, v, scales, length, lanes, **numbers)
    rounded = [decode(*encode(new)).double() for new in (new_k, new_v)]
    caches = [decode(codes, scales[..., i : i + 1]) for i, codes in enumerate((k, v))]
    expected, *kept = find("append_attention").reference(q, *rounded, *caches, length, lanes, **numbers)
    assert torch.allclose(y, expected, atol=1e-6)
    for i, (codes, cache) in enumerate(zip((k_after, v_after), kept, strict=True)):
        assert torch.allclose(decode(codes, scales_after[..., i : i + 1]), cache, atol=1e-6)


@pytest.mark.parametrize("dims", [dims for dims in PROMPT.test_dims if dims["rows"] <= 300][::4], ids=str)
def test_a_prompt_is_the_plain_one_over_what_codes_mean(dims: dict[str, int]) -> None:
    q, k, v, tiles, *cache = (
        t.double() if t.is_floating_point() else t for t in random_inputs(PROMPT, "fp32", dims, 3, "cpu")
    )
    numbers = {"window": dims.get("window", 0), "scale": 0.3}
    (y,) = PROMPT.reference(q, k, v, tiles, *cache, **numbers)
    plain = [decode(codes, cache[2][..., i : i + 1]) for i, codes in enumerate(cache[:2])]
    expected, *_ = find("prompt_attention").reference(q, k, v, tiles, *plain, **numbers)
    assert torch.allclose(y, expected)


@pytest.mark.parametrize("past", [0, 5])
def test_torchs_own_attention_does_the_same_where_it_is_timed(past: int) -> None:
    dims = {"lanes": 3, "heads": 2, "rows": 21, "slots": 3, "positions": 7 + past, "depth": 8, "past": past, "tiles": 9}
    inputs = random_inputs(PROMPT, "fp32", dims, 2, "cpu", full=True)
    (exact,) = PROMPT.reference(*inputs, window=0, scale=0.3)
    (theirs,) = PROMPT.peers["SDPA"](*inputs, window=0, scale=0.3)
    assert torch.allclose(exact, theirs, atol=1e-6)


@pytest.mark.parametrize("dims", QUANTISE.test_dims[::3], ids=str)
def test_rows_go_where_they_belong_and_nowhere_else(dims: dict[str, int]) -> None:
    inputs = random_inputs(QUANTISE, "fp16", dims, 3, "cpu")
    k, _, slots, positions, *before = inputs
    rounded, _, *after = QUANTISE.reference(*inputs)
    touched = torch.zeros(before[0].shape[0], before[0].shape[2], dtype=torch.bool)
    touched[slots, positions] = True
    assert touched.sum() == dims["rows"]  # no position twice
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new.transpose(1, 2)[~touched], old.transpose(1, 2)[~touched])
    for row in range(dims["rows"]):
        its = [t[slots[row], :, positions[row]] for t in after]
        assert torch.equal(its[0], encode(k[0, :, row])[0])
        assert torch.equal(rounded[0, :, row], decode(its[0], its[2][:, :1]).half())


def test_half_the_bytes_are_moved() -> None:
    dims = APPEND.bench_dims[-2]
    assert (dims["batch"], dims["positions"], dims["depth"]) == (64, 1024, 64)
    share = APPEND.bytes(dims, "fp16") / find("append_attention").bytes(dims, "fp16")
    assert share == pytest.approx((64 + 4) / 128, rel=1e-2)
    assert APPEND.flops(dims) == find("append_attention").flops(dims)
    rows = {"heads": 12, "rows": 100, "depth": 64, "slots": 3, "positions": 50}
    assert QUANTISE.bytes(rows, "fp16") == 2 * 100 * 12 * (64 * 2 + 64 + 4) + 2 * 8 * 100


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("spec", [APPEND, PROMPT, QUANTISE], ids=lambda spec: spec.name)
def test_nothing_is_spilled_and_enough_is_under_way(spec: KernelSpec, arch: str) -> None:
    """A multiprocessor holds enough threads for 32 KB of codes in flight: 16 bytes of keys, 16 of values each."""
    dtypes = [dtype for dtype in spec.dtypes if spec.runs_on(dtype, arch)]
    jobs = [(Variant.of(spec, dtype, dims, arch), dims) for dtype in dtypes for dims in spec.bench_dims]
    for (variant, dims), binary in zip(jobs, compile_many([(variant, arch) for variant, _ in jobs]), strict=True):
        report, block = binary.report, variant.launch(dims).block
        assert report.spill_bytes == report.stack_bytes == 0, variant.label
        if spec is APPEND and arch != "sm_75":
            held = resident_blocks(arch, block, report.registers or 0, report.shared_bytes or 0)
            assert held * block * 16 * 2 * dict(variant.tunables)["unroll"] >= 32 << 10, variant.label
