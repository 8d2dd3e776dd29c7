from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import SMALL
from warpline.config import FAMILY, ModelConfig
from warpline.engine.executors import create
from warpline.model import cost, parameters
from warpline.model.gpt2 import GPT2
from warpline.model.kv_cache import KVCache
from warpline.model.observe import observed
from warpline.model.parameters import ModelOp
from warpline.model.weights import load

GPT2_CONFIG = FAMILY["gpt2"][1]


def test_decode_anchor() -> None:
    """247.3 MB of fp16 weights per token, and 36,864 bytes for each cached position."""
    alone = cost.total_bytes(cost.decode(GPT2_CONFIG, "fp16", context=0))
    assert alone / 1e6 == pytest.approx(247.3, abs=0.05)
    assert cost.total_bytes(cost.decode(GPT2_CONFIG, "fp16", context=100)) - alone == 100 * 36_864
    assert cost.kv_bytes_per_position(GPT2_CONFIG, "fp16") == 36_864


def test_every_weight_is_read_once() -> None:
    work = cost.decode(GPT2_CONFIG, "fp32", context=7)
    read = sum(step.weight_bytes for step in cost.costs(work))
    rows = 2 * GPT2_CONFIG.n_embd * 4  # one row each of wte and wpe
    whole_wpe = GPT2_CONFIG.n_positions * GPT2_CONFIG.n_embd * 4
    assert read == cost.weight_bytes(GPT2_CONFIG, "fp32") - whole_wpe + rows


@given(batch=st.integers(1, 9), new=st.integers(1, 40), past=st.integers(0, 40), window=st.none() | st.integers(1, 100))
def test_pairs_and_cache_reads_match_a_count(batch: int, new: int, past: int, window: int | None) -> None:
    config = ModelConfig(n_layer=1, n_head=1, n_embd=8, window=window)
    work = cost.Workload(config=config, dtype="fp32", batch=batch, new=new, past=past)
    reach = window or past + new
    seen = [[j for j in range(i + 1) if j > i - reach] for i in range(past, past + new)]
    assert work.pairs == sum(map(len, seen))
    assert work.kv_read == len({j for row in seen for j in row if j < past})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(0, 40), st.none() | st.integers(1, 100))
def test_bytes_of_many_steps_are_the_sum_of_single_ones(lengths: list[int], steps: int, window: int | None) -> None:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=50, window=window)
    expected = 0
    for step in range(steps):
        alone = [cost.total_bytes(cost.decode(config, "fp16", context=length + step)) for length in lengths]
        shared = cost.total_bytes(cost.decode(config, "fp16", batch=len(lengths)))
        expected += shared + sum(alone) - len(lengths) * cost.total_bytes(cost.decode(config, "fp16"))
    assert cost.decode_bytes(config, "fp16", lengths=lengths, steps=steps) == expected


@pytest.mark.parametrize(("new", "past"), [(1, 5), (6, 0), (3, 4)])
def test_flops_of_products_match_torch(new: int, past: int) -> None:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    model = GPT2(config, naive=True)
    cache = KVCache(config, 3, 16, device=torch.device("cpu"), dtype=torch.float32)
    ids = torch.zeros(3, new, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, cache=cache, start=torch.full((3,), past), span=past + new, last=torch.zeros(3, dtype=torch.long))
    work = cost.Workload(config=config, dtype="fp32", batch=3, new=new, past=past, naive=True)
    products = {
        parameters.QKV_PROJECTION,
        parameters.SCORES,
        parameters.VALUES,
        parameters.OUTPUT_PROJECTION,
        parameters.EXPANSION,
        parameters.PROJECTION,
        parameters.LM_HEAD,
    }
    assert counter.get_total_flops() == sum(c.flops for c in cost.costs(work) if c.step in products)


def test_a_pass_runs_exactly_the_steps_that_are_costed() -> None:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    for naive in (False, True):
        ran: list[tuple[ModelOp, int | None]] = []

        def watch(step: ModelOp, layer: int | None, ran: list[tuple[ModelOp, int | None]] = ran) -> torch.no_grad:
            ran.append((step, layer))
            return torch.no_grad()

        model = GPT2(config, naive=naive)
        cache = KVCache(config, 1, 16, device=torch.device("cpu"), dtype=torch.float32)
        with observed(watch):
            model(torch.zeros(1, 3, dtype=torch.long), cache=cache, span=3)
        model(torch.zeros(1, 3, dtype=torch.long))  # unobserved again
        work = cost.Workload(config=config, dtype="fp32", new=3, logits=3, naive=naive)
        costed = {c.step: c.calls for c in cost.costs(work)}
        assert {step: sum(s is step for s, _ in ran) for step, _ in ran} == costed
        first_block = [step.name for step, layer in ran if layer in (None, 0)]
        in_order = [step.name for step in parameters.OPS if step in costed]
        assert first_block == in_order


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_a_position_takes_what_the_cache_has_for_it(dtype: str) -> None:
    """Compared with the memory that an executor allocates, with its own dtype where weights are int8."""
    weights = load(SMALL, dtype=dtype)
    slots = create("cpu", weights, torch.device("cpu"), dtype).allocate(1, 7)
    taken = (slots.cache.k.nbytes + slots.cache.v.nbytes) / 7 / slots.cache.k.shape[1]
    assert cost.kv_bytes_per_position(weights.config, dtype) == taken
