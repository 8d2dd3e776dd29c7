"""Attention: which masks use our kernels, and the trap of a name without a mask function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warpline.hf as whf
from tests.hf.conftest import close, left_padded, logits, make_model, random_ids
from warpline.hf import attention as ours


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of queries of each call of our kernels."""
    calls: list[int] = []
    original = ours._ours

    def count(query: Tensor, *others: Any) -> Tensor:
        calls.append(query.shape[2])
        return original(query, *others)

    monkeypatch.setattr(ours, "_ours", count)
    return calls


def only_attention(model: Any) -> None:
    whf.patch(model, mlp=False, layernorm=False, generate=False)


def test_prompts_and_steps_are_ours(model: Any, counted: list[int]) -> None:
    ids = random_ids(2, 20)
    before = logits(model, ids)
    only_attention(model)
    counted.clear()
    with torch.no_grad():
        first = model(ids[:, :19], use_cache=True)
        second = model(ids[:, 19:], past_key_values=first.past_key_values, use_cache=True)
    assert close(torch.cat((first.logits, second.logits), dim=1), before)
    assert counted == [19, 19, 1, 1]


@pytest.mark.parametrize("pads", [[0, 4, 11], [3, 3, 3]])
def test_padding_goes_to_the_models_own_function(model: Any, ids: Tensor, pads: list[int], counted: list[int]) -> None:
    mask = left_padded(ids, pads)
    before = logits(model, ids, attention_mask=mask)
    only_attention(model)
    counted.clear()
    assert torch.equal(logits(model, ids, attention_mask=mask)[mask.bool()], before[mask.bool()])
    assert not counted
    assert close(logits(model, ids, attention_mask=torch.ones_like(ids)), logits(make_model(), ids))


def test_several_tokens_behind_a_cache(model: Any, counted: list[int]) -> None:
    ids = random_ids(2, 20)
    before = logits(model, ids)
    only_attention(model)
    with torch.no_grad():
        first = model(ids[:, :12], use_cache=True)
        second = model(ids[:, 12:], past_key_values=first.past_key_values, use_cache=True)
    assert close(second.logits, before[:, 12:])


def test_masks_of_four_dimensions(model: Any, ids: Tensor) -> None:
    length = ids.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[5:, 2] = False
    mask = torch.zeros(3, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    before = logits(model, ids, attention_mask=mask, use_cache=False)
    only_attention(model)
    assert torch.equal(logits(model, ids, attention_mask=mask, use_cache=False), before)
    assert not close(before, logits(model, ids))


def test_static_cache(model: Any, counted: list[int]) -> None:
    from transformers import StaticCache

    ids = random_ids(2, 20)
    before = logits(model, ids)
    only_attention(model)
    cache = StaticCache(config=model.config, max_cache_len=40)
    places = torch.arange(20)
    with torch.no_grad():
        keywords: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        first = model(ids[:, :19], cache_position=places[:19], position_ids=places[None, :19], **keywords)
        second = model(ids[:, 19:], cache_position=places[19:], position_ids=places[None, 19:], **keywords)
    assert close(torch.cat((first.logits, second.logits), dim=1), before)


def test_attention_weights_are_there_where_they_were(ids: Tensor) -> None:
    model = make_model(attn_implementation="eager")
    with torch.no_grad():
        before = model(ids, output_attentions=True).attentions
        report = whf.patch(model)
        after = model(ids, output_attentions=True).attentions
    assert "attention" in report.left
    assert all(close(a, b) for a, b in zip(after, before, strict=True))


def test_eager_chosen_after_the_patch(model: Any, ids: Tensor) -> None:
    only_attention(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(ids, output_attentions=True)
    assert found.attentions[0].shape == (3, 4, 17, 17)
    assert close(found.logits, logits(make_model(), ids))


def test_layers_scaled_by_their_number(ids: Tensor) -> None:
    model = make_model(scale_attn_by_inverse_layer_idx=True)
    before = logits(model, ids)
    only_attention(model)
    assert close(logits(model, ids), before)


def test_a_name_without_its_mask_function_is_the_trap(ids: Tensor) -> None:
    """Without one, transformers passes no mask for padded rows, and raises no error. Ours has one under its name."""
    from transformers import AttentionInterface

    mask = left_padded(ids, [0, 4, 11])
    right = logits(make_model(), ids, attention_mask=mask)[mask.bool()]
    AttentionInterface.register("warpline-without-masks", ours.attention)
    trapped = make_model(attn_implementation="warpline-without-masks")
    assert not close(logits(trapped, ids, attention_mask=mask)[mask.bool()], right)
    named = make_model(attn_implementation=whf.register())
    assert close(logits(named, ids, attention_mask=mask)[mask.bool()], right)
    assert close(logits(named, ids), logits(make_model(), ids))
