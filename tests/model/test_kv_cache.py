"""An int8 KV cache: what codes mean, how precise they are, and that nothing depends on how a prompt is split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import SMALL, make_model, make_weights
from warpline.codes import decode, encode
from warpline.config import EngineConfig, ModelConfig
from warpline.engine.executors import create
from warpline.model import cost
from warpline.model.gpt2 import GPT2
from warpline.model.kv_cache import KVCache
from warpline.model.weights import load

CPU = torch.device("cpu")
INT8 = EngineConfig(kv_dtype="int8")


@given(st.integers(1, 130), st.integers(-60, 60), st.integers(0, 2**32))
def test_codes_are_as_near_as_half_a_scale(depth: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, 3, depth, generator=generator) * 2.0**exponent
    codes, scale = encode(rows)
    assert codes.dtype == torch.int8
    assert codes.abs().max() == 127
    off = (decode(codes, scale.double()) - rows).abs()
    assert (off <= 0.5 * scale.double() * (1 + 2**-16)).all()
    largest = rows.abs().argmax(-1, keepdim=True)
    assert (off.gather(-1, largest) <= 2**-22 * rows.abs().gather(-1, largest)).all()


def test_zeros_vanishing_rows_and_what_is_no_number() -> None:
    nothing = torch.zeros(1, 5)
    tiny = torch.tensor([[1e-40, -3e-39, 0.0, 1e-33, -1e-30]])
    for rows in (nothing, tiny):
        codes, scale = encode(rows)
        assert not codes.any()
        assert torch.allclose(decode(codes, scale), rows, atol=1e-28)
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows = torch.tensor([[1.0, bad, 3.0], [1.0, 2.0, 3.0]])
        found = decode(*encode(rows))
        assert found[0].isnan().all()
        assert found[1].isfinite().all()
    largest = torch.finfo(torch.float32).max
    assert decode(*encode(torch.tensor([[largest, -largest]]))).isfinite().all()
    half = torch.tensor([[65504.0, -65504.0, 1.0]], dtype=torch.float16)
    assert decode(*encode(half)).half().isfinite().all()


@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 1, 6)])
@pytest.mark.parametrize("in_place", [True, False])
def test_logits_are_those_of_rounded_keys_and_values(chunks: tuple[int, ...], in_place: bool) -> None:
    """A model without a cache rounds its keys and values as they are made, however the prompt is split."""
    config = ModelConfig(n_layer=2, n_head=2, n_embd=12, vocab_size=50, n_positions=16)
    model = make_model(make_weights(config))
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    width = config.n_embd

    def rounded(_module: object, _inputs: object, qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv[..., width:].unflatten(-1, (2 * config.n_head, -1))
        return torch.cat([qkv[..., :width], decode(*encode(heads)).flatten(-2)], -1)

    cache = KVCache(config, 4, 13, device=CPU, dtype=torch.int8)
    slots, found, start = None if in_place else torch.tensor([3, 1]), [], 0
    for count in chunks:
        part = ids[:, start : start + count]
        found.append(model(part, cache=cache, start=torch.full((2,), start), span=start + count, slots=slots))
        start += count
    hooks = [block.attn.c_attn.register_forward_hook(rounded) for block in model.h]  # type: ignore[union-attr]
    expected, rough = model(ids), make_exact(model, hooks)(ids)
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-4)
    assert (rough - expected).abs().max() > 1e-3  # rounding has a visible effect


def make_exact(model: GPT2, hooks: list[torch.utils.hooks.RemovableHandle]) -> GPT2:
    for hook in hooks:
        hook.remove()
    return model


def test_a_position_takes_codes_and_scales() -> None:
    weights = load(SMALL)
    executor = create("torch", weights, CPU, "fp32", INT8)
    cache = executor.allocate(1, 7).cache
    taken = sum(tensor.nbytes for tensor in cache.tensors) / 7 / cache.k.shape[1]
    assert cost.kv_bytes_per_position(weights.config, "fp32", "int8") == taken
    assert taken / cost.kv_bytes_per_position(weights.config, "fp16") == (16 + 4) / 32  # heads of 16


def test_bytes_of_a_step_count_codes() -> None:
    config = ModelConfig(n_layer=3, n_head=2, n_embd=64, vocab_size=50)
    each = cost.kv_bytes_per_position(config, "fp16", "int8")
    alone, behind = (cost.total_bytes(cost.decode(config, "fp16", context=n, kv_dtype="int8")) for n in (0, 9))
    assert behind - alone == 9 * each == 9 * 2 * 3 * (64 + 2 * 4)
    steps = cost.decode_bytes(config, "fp16", lengths=[9], steps=2, kv_dtype="int8")
    assert steps == 2 * behind + each
    window = replace(config, window=4)
    seen = cost.Workload(config=window, dtype="fp16", kv_dtype="int8", past=9)
    assert sum(c.kv_bytes for c in cost.costs(seen)) == 4 * each  # three are read, one is written


def test_a_copy_and_an_erasure_are_of_scales_too() -> None:
    slots = create("torch", load(SMALL), CPU, "fp32", INT8).allocate(4, 9)
    cache = slots.cache
    assert cache.scales is not None
    cache.k.random_(-127, 128)
    cache.scales.uniform_()
    slots.copy(2, [0, 3], 5)
    for tensor in cache.tensors:
        assert torch.equal(tensor[:, 3, :, :5], tensor[:, 2, :, :5])
    assert not torch.equal(cache.scales[:, 3, :, 5:], cache.scales[:, 2, :, 5:])
    slots.erase(3)
    assert not cache.scales[:, 3].any()
