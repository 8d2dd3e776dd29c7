"""A patched model whose `generate` runs on int8 copies of its matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warpline.hf as whf
from tests.hf.conftest import END, close, logits, make_model, random_ids
from warpline.errors import ConfigError
from warpline.hf import probe
from warpline.hf.weights import in_codes, take
from warpline.model.parameters import CONV1D
from warpline.model.quantise import dequantised

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": END}


def rounded(model: Any) -> Any:
    """Return a copy of the model with the numbers that int8 codes of its matrices stand for."""
    tensors = dequantised(in_codes(take(model, copy=False, eos=None)).weights, torch.float32).tensors
    copy = make_model()
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            name = name.removeprefix("transformer.")
            parameter.copy_(tensors[name].t() if name.endswith(CONV1D) else tensors[name])
    return copy


def test_tokens_are_those_of_the_rounded_weights(model: Any, ids: Tensor) -> None:
    """The oracle is transformers with dequantised weights; forward keeps the model's own weights."""
    before, oracle = logits(model, ids), rounded(model)
    report = whf.patch(model, dtype="int8")
    assert "dtype=int8" in report.replaced["generate"]
    assert "as int8 codes" in report.replaced["generate"]
    assert close(logits(model, ids), before)
    found = model.generate(ids, **GREEDY)
    assert report.calls == {"engine": 1}
    seen = logits(oracle, found)[:, ids.shape[1] - 1 : -1]
    deficit = seen.amax(dim=-1) - seen.gather(-1, found[:, ids.shape[1] :, None])[..., 0]
    assert deficit.max() < 1e-3 * seen.std()
    assert whf.unpatch(model)
    assert not torch.equal(seen, logits(model, found)[:, ids.shape[1] - 1 : -1])  # codes are not the weights


def test_new_weights_become_new_codes(model: Any) -> None:
    ids = random_ids(2, 9)
    whf.patch(model, dtype="int8")
    first = model.generate(ids, **GREEDY)
    with torch.no_grad():
        model.transformer.wte.weight.neg_()
    again = model.generate(ids, **GREEDY)
    assert not torch.equal(first, again)
    whf.unpatch(model)
    whf.patch(model, dtype="int8")
    assert torch.equal(model.generate(ids, **GREEDY), again)


def test_patched_restores_the_outer_codes(model: Any, ids: Tensor) -> None:
    whf.patch(model, dtype="int8")
    codes = model.generate(ids, **GREEDY)
    with whf.patched(model) as report:
        assert "int8" not in report.replaced["generate"]
    assert torch.equal(model.generate(ids, **GREEDY), codes)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "fp16"}, 'dtype is "int8" or left out'),
        ({"kv_dtype": "int4"}, 'kv_dtype is "int8" or left out'),
        ({"dtype": "int8", "generate": False}, "dtype is for generate"),
        ({"kv_dtype": "int8"}, "the cpu executor has no kv_dtype='int8'"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(model: Any, ids: Tensor, options: dict[str, Any], why: str) -> None:
    before = model.generate(ids, **GREEDY)
    with pytest.raises(ConfigError, match=why):
        whf.patch(model, **options)
    assert not whf.unpatch(model)
    assert torch.equal(model.generate(ids, **GREEDY), before)


def test_a_model_that_the_engine_cannot_run_is_refused(ids: Tensor) -> None:
    """Without codes the patch leaves generate out; with them it would not do what was asked."""
    model = make_model(reorder_and_upcast_attn=True)
    assert "upcast" in whf.patch(model).left["generate"]
    whf.unpatch(model)
    with pytest.raises(ConfigError, match=r"cannot run on int8 codes: .*upcast"):
        whf.patch(model, dtype="int8")


@pytest.mark.parametrize(
    ("options", "remedy"), [({"dtype": "int8"}, "leave out dtype and kv_dtype"), ({}, "pass generate=False")]
)
def test_wrong_tokens_are_refused_with_a_way_out(
    model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], remedy: str
) -> None:
    before, judge = model.generate(ids, **GREEDY), probe.judge
    monkeypatch.setattr(probe, "judge", lambda *given: judge(*given) + 1e6)
    with pytest.raises(ConfigError, match=f"below the model's likeliest.*: {remedy}$"):
        whf.patch(model, **options)
    assert torch.equal(model.generate(ids, **GREEDY), before)
