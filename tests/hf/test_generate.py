"""`generate` of a patched model: the engine where possible, the original method elsewhere, the same text in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warpline.hf as whf
from tests.hf.conftest import END, left_padded, logits, make_model, random_ids
from warpline.errors import ConfigError
from warpline.hf import runner as runners
from warpline.hf.report import Report
from warpline.hf.weights import take

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def compare(model: Any, ids: Tensor, **arguments: Any) -> Report:
    """Generate before and after the patch; the tokens must be the same."""
    whf.unpatch(model)
    before = model.generate(ids, **arguments)
    report = whf.patch(model)
    after = model.generate(ids, **arguments)
    assert after.dtype == before.dtype
    assert torch.equal(after, before)
    return report


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_new_tokens": 6},
        {"min_length": 25},
        {"max_new_tokens": 1},
        {"eos_token_id": None},
        {"eos_token_id": [7]},
        {"eos_token_id": 0},
        {"repetition_penalty": 1.7},
        {"max_new_tokens": None, "max_length": 30},
        {"num_beams": 1, "top_k": 5, "temperature": 1.0},
        {"return_dict_in_generate": False, "use_cache": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # transformers warns about settings that greedy decoding does not use
def test_what_the_engine_does(model: Any, ids: Tensor, changes: dict[str, Any]) -> None:
    report = compare(model, ids, attention_mask=torch.ones_like(ids), **GREEDY | changes)
    assert report.calls == {"engine": 1}


@pytest.mark.filterwarnings("ignore")
def test_rows_that_end_early_are_padded(ids: Tensor) -> None:
    model, found = make_model(), set()
    base = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **GREEDY)[:, ids.shape[1] :]
    for end in {int(base[0, 3]), int(base[1, 5]), int(base[2, 1])}:
        report = compare(model, ids, attention_mask=torch.ones_like(ids), eos_token_id=end, **GREEDY)
        assert report.calls == {"engine": 1}
        found.add(model.generate(ids, eos_token_id=end, attention_mask=torch.ones_like(ids), **GREEDY).shape[1])
    report = compare(model, ids[:1], attention_mask=torch.ones_like(ids[:1]), eos_token_id=int(base[0, 3]), **GREEDY)
    assert report.calls == {"engine": 1}
    assert model.generate(ids[:1], eos_token_id=int(base[0, 3]), **GREEDY).shape[1] < ids.shape[1] + 12


def test_left_padding(model: Any, ids: Tensor) -> None:
    report = compare(model, ids, attention_mask=left_padded(ids, [0, 4, 11]), **GREEDY)
    assert report.calls == {"engine": 1}


def test_many_rows_in_turns(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "MOST_SEQUENCES", 2)
    ids = random_ids(5, 6)
    assert compare(model, ids, attention_mask=torch.ones_like(ids), **GREEDY).calls == {"engine": 1}
    longer = random_ids(3, 40)  # and more of them at once
    expected = model.generate(longer, attention_mask=torch.ones_like(longer), **GREEDY)
    whf.unpatch(model)
    assert torch.equal(model.generate(longer, attention_mask=torch.ones_like(longer), **GREEDY), expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"num_beams": 3, "num_return_sequences": 2}, "num_beams"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"bad_words_ids": [[5]]}, "bad_words_ids"),
        ({"suppress_tokens": [5, 6]}, "suppress_tokens"),
        ({"eos_token_id": [7, 8]}, "several eos_token_id"),
        ({"use_cache": False}, "use_cache=False"),
        ({"max_new_tokens": None}, "neither max_new_tokens"),
        ({"logits_processor": []}, "logits_processor"),
        ({"position_ids": torch.arange(17)[None].expand(3, -1)}, "position_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_original_does(model: Any, ids: Tensor, changes: dict[str, Any], reason: str) -> None:
    report = compare(model, ids, attention_mask=torch.ones_like(ids), **GREEDY | changes)
    (outcome,) = report.calls
    assert outcome.startswith("original method: ")
    assert reason in outcome
    assert reason in str(report)


@pytest.mark.filterwarnings("ignore")
def test_masks_and_pads_that_are_not_ours(model: Any, ids: Tensor) -> None:
    holes = torch.ones_like(ids)
    holes[1, 5] = 0
    for mask, reason in ((holes, "hides more"), (left_padded(ids, [0, 4, 11]).flip(1), "hides more")):
        (outcome,) = compare(model, ids, attention_mask=mask, **GREEDY).calls
        assert reason in outcome
    padded = ids.clone()
    padded[1, :4] = 0
    (outcome,) = compare(model, padded, **GREEDY).calls
    assert "pads without" in outcome
    mask = left_padded(ids, [0, 4, 11])
    (outcome,) = compare(model, ids, attention_mask=mask, repetition_penalty=1.5, **GREEDY).calls
    assert "penalises the pads" in outcome


def test_dictionary_outputs_and_hooks(model: Any, ids: Tensor) -> None:
    report = whf.patch(model)
    found = model.generate(ids, return_dict_in_generate=True, output_scores=True, **GREEDY)
    assert len(found.scores) == 12
    seen: list[int] = []
    handle = model.transformer.ln_f.register_forward_hook(lambda *_: seen.append(1))
    model.generate(ids, **GREEDY)
    assert len(seen) == 12
    handle.remove()
    model.generate(input_ids=ids, **GREEDY)
    assert len(seen) == 12
    assert sorted(report.calls.values()) == [1, 1, 1]


def test_generation_config_is_followed(model: Any, ids: Tensor) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=END)
    report = compare(model, ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert report.calls == {"engine": 1}
    model.generation_config.no_repeat_ngram_size = 2
    report = compare(model, ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert list(report.calls) == ["original method: no_repeat_ngram_size"]


def test_beyond_the_context_fails_as_it_did(model: Any) -> None:
    ids = random_ids(1, 90)
    report = whf.patch(model)
    with pytest.raises(IndexError):
        model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert "do not fit" in next(iter(report.calls))


def test_sampling_is_the_originals_unless_allowed(model: Any, ids: Tensor) -> None:
    drawn: dict[str, Any] = GREEDY | {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.9}
    mask = torch.ones_like(ids)
    torch.manual_seed(3)
    before = model.generate(ids, attention_mask=mask, **drawn)
    report = whf.patch(model)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, attention_mask=mask, **drawn), before)
    assert "do_sample" in next(iter(report.calls))
    report = whf.patch(model, sampling=True)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, attention_mask=mask, num_return_sequences=2, **drawn))
    assert report.calls == {"engine": 3}
    assert texts[0].shape == (6, 17 + 12)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0][0], texts[0][1])
    assert torch.equal(texts[0][:, :17], ids.repeat_interleave(2, dim=0))


def test_sampled_tokens_follow_the_models_probabilities(model: Any) -> None:
    ids = random_ids(1, 8)
    expected = logits(model, ids)[0, -1].topk(4)
    share = expected.values.softmax(dim=-1)
    whf.patch(model, sampling=True)
    torch.manual_seed(0)
    rows = ids.expand(1500, -1)
    found = model.generate(rows, max_new_tokens=1, do_sample=True, top_k=4, pad_token_id=0)[:, -1]
    for token, probability in zip(expected.indices.tolist(), share.tolist(), strict=True):
        assert abs(float((found == token).float().mean()) - probability) < 5 * (0.25 / 1500) ** 0.5


@pytest.mark.parametrize("way", ["in place", "data", "load", "convert"])
def test_changed_weights_are_noticed(model: Any, ids: Tensor, way: str) -> None:
    whf.patch(model)
    stale = model.generate(ids, **GREEDY)
    other = make_model(initializer_range=0.3)
    weight = model.transformer.h[1].mlp.c_fc.weight
    if way == "in place":
        with torch.no_grad():
            weight.mul_(-1)
    elif way == "data":
        weight.data.mul_(-1)
    elif way == "load":
        model.load_state_dict(other.state_dict())
    else:
        model.half()
    found = model.generate(ids, **GREEDY)
    whf.unpatch(model)
    assert torch.equal(model.generate(ids, **GREEDY), found)
    if way != "convert":
        assert not torch.equal(found, stale)


def test_weights_are_shared_where_the_layout_allows(model: Any) -> None:
    report = whf.patch(model)
    assert "MB of weights shared" in report.replaced["generate"]
    config, copied = model.config, model.generate.runner.taken
    assert copied.copied_bytes == 4 * config.n_layer * 12 * config.n_embd**2
    assert copied.weights.tensors["h.0.mlp.c_fc.weight"].is_contiguous()
    assert copied.weights.tensors["wte.weight"].data_ptr() == model.lm_head.weight.data_ptr()
    assert copied.weights.tensors["wpe.weight"].data_ptr() == model.transformer.wpe.weight.data_ptr()
    assert take(model, copy=False, eos=None).copied_bytes == 0  # torch can compute with these views


def test_untied_head(ids: Tensor) -> None:
    model = make_model(tie_word_embeddings=False)
    assert model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr()
    assert compare(model, ids, attention_mask=torch.ones_like(ids), **GREEDY).calls == {"engine": 1}


def test_train_mode(model: Any, ids: Tensor) -> None:
    report = whf.patch(model)
    model.train()
    with pytest.warns(UserWarning, match="train mode"):
        model.generate(ids, **GREEDY)
    assert list(report.calls) == ["original method: train mode"]


def test_inference_mode(model: Any, ids: Tensor) -> None:
    with torch.inference_mode():
        whf.patch(model)
        first = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), first)
    longer = random_ids(4, 60)
    with torch.inference_mode():
        inside = model.generate(longer, **GREEDY)
    assert torch.equal(model.generate(longer, **GREEDY), inside)


def test_an_engine_that_is_wrong_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners.Runner, "run", lambda self, requests: [[1] * 8 for _ in requests])
    with pytest.raises(ConfigError, match="below the model's likeliest"):
        whf.patch(model)
    assert "generate" not in model.__dict__
