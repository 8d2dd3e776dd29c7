"""The oracle compared with `transformers`: same weights, same logits."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import make_model, make_weights
from warpline.config import FAMILY, ModelConfig
from warpline.model import parameters
from warpline.model.gpt2 import GPT2
from warpline.model.kv_cache import KVCache
from warpline.model.weights import Weights, checkpoint

LENGTHS = (1, 2, 127, 128, 1023, 1024)

CONFIGS = {
    "small": ModelConfig(n_layer=2, n_head=2, n_embd=64),
    "one head": ModelConfig(n_layer=1, n_head=1, n_embd=48, vocab_size=99),
    "xl heads": ModelConfig(n_layer=3, n_head=25, n_embd=200, vocab_size=777),
    "narrow MLP": ModelConfig(n_layer=2, n_head=4, n_embd=64, n_inner=52, vocab_size=1001),
    "exact gelu": ModelConfig(n_layer=2, n_head=2, n_embd=32, activation_function="gelu", vocab_size=500),
    "relu, eps": ModelConfig(n_layer=2, n_head=2, n_embd=32, activation_function="relu", layer_norm_epsilon=1e-3),
    "tanh": ModelConfig(n_layer=1, n_head=2, n_embd=32, activation_function="tanh", vocab_size=500),
    "unscaled": ModelConfig(n_layer=2, n_head=2, n_embd=32, scale_attn_weights=False, vocab_size=500),
    "layer-scaled": ModelConfig(n_layer=4, n_head=2, n_embd=32, scale_attn_by_inverse_layer_idx=True, vocab_size=500),
    "untied": ModelConfig(n_layer=2, n_head=2, n_embd=32, tie_word_embeddings=False, vocab_size=500),
}


def hf_model(weights: Weights) -> Any:
    config = transformers.GPT2Config(**{**weights.config.to_hf(), "attn_implementation": "eager"})
    model = transformers.GPT2LMHeadModel(config)
    tensors = checkpoint(weights)
    if weights.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert not missing
    return model.eval()


@functools.cache
def pair(name: str) -> tuple[Weights, GPT2, GPT2, Any]:
    weights = make_weights(CONFIGS[name], std=0.05)
    return weights, make_model(weights), make_model(weights, naive=True), hf_model(weights)


def random_ids(config: ModelConfig, batch: int, length: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_equal_transformers(name: str, length: int) -> None:
    weights, fused, naive, hf = pair(name)
    ids = random_ids(weights.config, 2 if length < 1000 else 1, length)
    expected = hf(ids).logits
    assert (fused(ids) - expected).abs().max() < 1e-4
    assert (naive(ids) - expected).abs().max() < 1e-4


@torch.no_grad()
def test_logits_equal_transformers_at_full_size() -> None:
    weights = make_weights(FAMILY["gpt2"][1], std=0.02)
    hf, ours = hf_model(weights), make_model(weights)
    for length in (1, 127, 300):
        ids = random_ids(weights.config, 1, length)
        assert (ours(ids) - hf(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_named_and_shaped_as_declared(name: str) -> None:
    with torch.device("meta"):
        state = GPT2(CONFIGS[name]).state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == parameters.shapes(CONFIGS[name])


def cached_logits(model: GPT2, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Feed `ids` piece by piece through a cache."""
    batch, length = ids.shape
    cache = KVCache(model.config, batch, length, device=ids.device, dtype=torch.float32)
    outputs, done = [], 0
    for size in pieces:
        start = torch.full((batch,), done)
        outputs.append(model(ids[:, done : done + size], cache=cache, start=start, span=done + size))
        done += size
    assert done == length
    return torch.cat(outputs, dim=1)


@settings(max_examples=25)
@given(data=st.data())
@torch.no_grad()
def test_cached_equals_uncached(data: st.DataObject) -> None:
    weights, *_ = pair("narrow MLP")
    window = data.draw(st.none() | st.integers(1, 30))
    model = make_model(replace(weights, config=replace(weights.config, window=window)), naive=data.draw(st.booleans()))
    pieces = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    ids = random_ids(weights.config, data.draw(st.integers(1, 3)), sum(pieces))
    assert (cached_logits(model, ids, pieces) - model(ids)).abs().max() < 1e-4


@pytest.mark.parametrize("window", [1, 2, 5, 16, 64, 1000])
@torch.no_grad()
def test_window_agrees_with_masked_transformers(window: int) -> None:
    """An explicit additive mask given to `transformers` is the reference, for prefill and for decode."""
    weights, _, _, hf = pair("narrow MLP")
    ids = random_ids(weights.config, 2, 65)
    place = torch.arange(65)
    seen = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - window)
    mask = torch.zeros(65, 65).masked_fill(~seen, torch.finfo(torch.float32).min).expand(2, 1, 65, 65)
    expected = hf(ids, attention_mask=mask).logits
    for naive in (False, True):
        model = make_model(replace(weights, config=replace(weights.config, window=window)), naive=naive)
        assert (model(ids) - expected).abs().max() < 1e-4
        assert (cached_logits(model, ids, [40, *[1] * 25]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("slots", [None, [0, 1, 2], [4, 0, 3]])
@torch.no_grad()
def test_ragged_batch_in_one_cache(slots: list[int] | None) -> None:
    """Sequences at different positions of one cache see their own past and nothing else."""
    weights = make_weights(CONFIGS["small"], std=0.05)
    model = make_model(weights)
    ids = random_ids(weights.config, 3, 20)
    lengths = torch.tensor([4, 11, 19])
    cache = KVCache(weights.config, 5, 32, device=ids.device, dtype=torch.float32)
    where = None if slots is None else torch.tensor(slots)
    logits = model(ids[:, :19], cache=cache, span=19, last=lengths - 1, slots=where)
    step = model(ids.gather(1, lengths[:, None]), cache=cache, start=lengths, span=20, slots=where)[:, 0]
    used = cache.k.abs().amax(dim=(0, 2, 3, 4)) > 0
    assert used.nonzero().flatten().tolist() == sorted(slots or [0, 1, 2])
    for row, length in enumerate(lengths.tolist()):
        alone = model(ids[row : row + 1, : length + 1])[0]
        assert (logits[row] - alone[length - 1]).abs().max() < 1e-4
        assert (step[row] - alone[length]).abs().max() < 1e-4


def test_a_cache_takes_no_memory_before_it_is_used() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    before = resident()
    cache = KVCache(FAMILY["gpt2"][1], 8, 1024, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert cache.k.nbytes + cache.v.nbytes > 300e6
    assert resident() - before < 30e6
    assert not cache.k[3, 5, 2].any()
    cache.k[:, 5] = 1
    assert int(cache.k.sum(dtype=torch.float32)) == cache.k[:, 5].numel()


def test_model_compiles_without_graph_breaks() -> None:
    model = make_model(make_weights(CONFIGS["small"], std=0.05))
    ids = random_ids(model.config, 1, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(ids), model(ids))


def test_gradients_flow() -> None:
    model = GPT2(CONFIGS["small"])
    logits = model(random_ids(model.config, 2, 9))
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
