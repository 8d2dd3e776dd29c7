"""Patching and its undoing: what changes, what stays, and what is refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import warpline.hf as whf
from tests.hf.conftest import close, left_padded, logits, make_model
from warpline.bench.methods.hf import as_transformers
from warpline.errors import ConfigError
from warpline.hf import probe
from warpline.hf.modules import MLP
from warpline.hf.patching import RECORD
from warpline.model import weights

PARTS = ("mlp", "layernorm", "attention", "generate")


def instance_attributes(model: Any) -> dict[str, set[str]]:
    return {name: set(module.__dict__) for name, module in model.named_modules()}


def test_everything_is_replaced_and_nothing_changes(model: Any, ids: Tensor) -> None:
    before, keys = logits(model, ids), list(model.state_dict())
    report = whf.patch(model)
    assert set(report.replaced) == set(PARTS)
    assert not report.left
    assert report.difference <= report.allowed < 1e-3
    assert type(model.transformer.h[0].mlp.forward) is MLP
    assert close(logits(model, ids), before)
    assert list(model.state_dict()) == keys
    for part in PARTS:
        assert part in str(report)


def test_unpatching_restores_exactly(model: Any, ids: Tensor) -> None:
    attributes, before, config = instance_attributes(model), logits(model, ids), model.transformer.h[0].attn.config
    whf.patch(model)
    assert instance_attributes(model) != attributes
    assert whf.unpatch(model)
    assert not whf.unpatch(model)
    assert instance_attributes(model) == attributes
    assert model.transformer.h[0].attn.config is config
    assert torch.equal(logits(model, ids), before)


def test_patching_twice_is_patching_once(model: Any, ids: Tensor) -> None:
    attributes, before = instance_attributes(model), logits(model, ids)
    whf.patch(model)
    report = whf.patch(model, mlp=False)
    assert report.left == {"mlp": "not asked for"}
    assert "forward" not in model.transformer.h[0].mlp.__dict__
    assert close(logits(model, ids), before)
    whf.unpatch(model)
    assert instance_attributes(model) == attributes


@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone(model: Any, ids: Tensor, part: str) -> None:
    before = logits(model, ids)
    report = whf.patch(model, **cast(Any, {name: name == part for name in PARTS}))
    assert set(report.replaced) == {part}
    assert set(report.left) == set(PARTS) - {part}
    assert close(logits(model, ids), before)


def test_context_manager_returns_to_what_was(model: Any) -> None:
    with whf.patched(model, generate=False) as report:
        assert "mlp" in report.replaced
        assert RECORD in model.__dict__
    assert RECORD not in model.__dict__
    whf.patch(model, mlp=False)
    with whf.patched(model, layernorm=False):
        assert "forward" in model.transformer.h[0].mlp.__dict__
    assert "forward" not in model.transformer.h[0].mlp.__dict__
    assert "forward" in model.transformer.ln_f.__dict__
    with pytest.raises(RuntimeError, match="on purpose"), whf.patched(model):
        raise RuntimeError("on purpose")
    assert "forward" not in model.transformer.h[0].mlp.__dict__


def test_models_that_share_a_config_are_left_alone(model: Any, ids: Tensor) -> None:
    from transformers import GPT2LMHeadModel

    other = GPT2LMHeadModel(model.config).eval()
    whf.patch(model)
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"
    assert other.transformer.h[0].attn.config._attn_implementation == "sdpa"
    assert "forward" not in other.transformer.h[0].mlp.__dict__


def test_saved_while_patched_and_loaded_again(model: Any, ids: Tensor, tmp_path: Path) -> None:
    before = logits(model, ids)
    whf.patch(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, ids), before)
    assert RECORD not in loaded.__dict__
    assert "warpline" not in (tmp_path / "config.json").read_text()
    whf.patch(loaded)
    assert close(logits(loaded, ids), before)


def test_copies_are_patched_on_their_own(model: Any, ids: Tensor) -> None:
    before = logits(model, ids)
    whf.patch(model)
    twin = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (twin, torch.load(stream, weights_only=False)):
        assert other.transformer.h[0].mlp.forward.module is other.transformer.h[0].mlp
        with torch.no_grad():
            other.transformer.h[0].mlp.c_fc.weight.zero_()
        assert not close(logits(other, ids), before)
        assert close(logits(model, ids), before)
        told = other.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert whf.unpatch(other)
        assert torch.equal(other.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), told)
    assert close(logits(model, ids), before)


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """For bf16 oneDNN uses AMX instructions, which kill the process on machines that announce but do not grant them."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_converted_after_patching(model: Any, ids: Tensor, dtype: torch.dtype) -> None:
    whf.patch(model)
    model.to(dtype)
    ours = logits(model, ids)
    whf.unpatch(model)
    theirs = logits(model, ids)
    assert ours.dtype == dtype
    rounding = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    assert (ours - theirs).abs().max() <= 48 * rounding * 8**0.5 * theirs.float().std()


def test_float64_runs_as_it_did(model: Any, ids: Tensor) -> None:
    with pytest.raises(ConfigError, match="float64"):
        whf.patch(make_model().double())
    whf.patch(model)
    model.double()
    with pytest.warns(UserWarning, match="float64"):
        ours = logits(model, ids)
    whf.unpatch(model)
    assert torch.equal(ours, logits(model, ids))


def test_moved_to_another_device(model: Any) -> None:
    whf.patch(model)
    block = model.to("meta").transformer.h[0]
    x = torch.zeros(2, 5, 64, device="meta")  # transformers cannot run a whole pass with such tensors
    with torch.no_grad():
        with pytest.warns(UserWarning, match="do not run on meta"):
            assert block.mlp(x).shape == x.shape
        assert block.ln_1(x).device == x.device  # warned once
    with pytest.raises(ConfigError, match="on meta"):
        whf.patch(model)


def test_training_falls_back_with_one_warning_and_gradients(ids: Tensor) -> None:
    quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model, other = make_model(**quiet), make_model(**quiet)
    whf.patch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for trained in (model, other):
            trained.train()
            for _ in range(2):
                trained(input_ids=ids, labels=ids).loss.backward()
    ours = [w for w in caught if "warpline" in str(w.message)]
    assert len(ours) == 1
    assert "train mode" in str(ours[0].message)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None, name
        assert torch.equal(a.grad, b.grad), name


def test_gradients_in_eval_mode(model: Any, ids: Tensor) -> None:
    whf.patch(model)
    with pytest.warns(UserWarning, match="gradients are recorded"):
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_patched_in_train_mode_stays_in_it() -> None:
    model = make_model().train()
    model.transformer.h[0].eval()
    report = whf.patch(model)
    assert set(report.replaced) == set(PARTS)
    assert model.training
    assert not model.transformer.h[0].training
    assert model.transformer.h[1].mlp.dropout.training


@pytest.mark.usefixtures("without_onednn")
def test_autocast_runs_the_original(model: Any, ids: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = logits(model, ids)
    whf.patch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        assert torch.equal(logits(model, ids), before)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # masks of transformers 4.57
@pytest.mark.parametrize("padded", [False, True])
def test_compiled_as_one_graph(model: Any, ids: Tensor, padded: bool) -> None:
    mask = left_padded(ids, [0, 5, 9]) if padded else None
    before = logits(model, ids, attention_mask=mask, use_cache=False)
    whf.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    after = logits(compiled, ids, attention_mask=mask, use_cache=False)
    seen = slice(None) if mask is None else mask.bool()
    assert close(after[seen], before[seen])


def test_other_heads(ids: Tensor) -> None:
    from transformers import GPT2ForSequenceClassification, GPT2Model

    config = make_model().config
    base = GPT2Model(config).eval()
    with torch.no_grad():
        before = base(ids).last_hidden_state
        report = whf.patch(base)
        assert "GPT2Model" in report.left["generate"]
        assert close(base(ids).last_hidden_state, before)
    report = whf.patch(GPT2ForSequenceClassification(config).eval())
    assert set(report.replaced) == {"mlp", "layernorm", "attention"}


def test_configs_that_ask_for_tuples(model: Any, ids: Tensor) -> None:
    base = model.transformer  # heads of newer versions do not work with such a config
    base.config.return_dict = False
    with torch.no_grad():
        before = base(input_ids=ids)
        assert set(whf.patch(base).replaced) == set(PARTS) - {"generate"}
        after = base(input_ids=ids)
    assert isinstance(after, tuple)
    assert close(after[0], before[0])


def test_what_cannot_be_done_is_left_with_its_reason(ids: Tensor) -> None:
    for changes, part, reason in (
        ({"activation_function": "relu"}, "mlp", "tanh form only"),
        ({"attn_implementation": "eager"}, "attention", "eager"),
        ({"sliding_window": 8}, "attention", "sliding window"),
        ({"sliding_window": 8}, "generate", "sliding window"),
        ({"add_cross_attention": True}, "crossattention", "causal"),
        ({"add_cross_attention": True}, "generate", "cross-attention"),
    ):
        model = make_model(**changes)
        before = logits(model, ids)
        report = whf.patch(model)
        assert reason in report.left[part]
        assert close(logits(model, ids), before)


def test_parts_changed_by_others_are_left(model: Any) -> None:
    class Odd(torch.nn.LayerNorm):
        pass

    model.transformer.ln_f = Odd(64)
    hooked = model.transformer.h[0].mlp
    hooked.forward = hooked.forward
    report = whf.patch(model)
    assert "Odd" in report.left["layernorm"]
    assert report.replaced["layernorm"].startswith("4 of 5")
    assert report.replaced["mlp"].startswith("1 of 2")


def test_parts_changed_after_the_patch_are_called(model: Any, ids: Tensor) -> None:
    class Adapted(torch.nn.Module):
        """An adapter: it has the weight of what it wraps, and something more."""

        def __init__(self, inner: Any):
            super().__init__()
            self.inner = inner

        @property
        def weight(self) -> Tensor:
            found: Tensor = self.inner.weight
            return found

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) + 1
            return result

    before = logits(model, ids)
    report = whf.patch(model)
    seen: list[int] = []
    handle = model.transformer.h[0].mlp.act.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="has hooks or has been replaced"):
        assert close(logits(model, ids), before)
    assert len(seen) == 1
    handle.remove()
    mlp = model.transformer.h[0].mlp
    mlp.c_fc = Adapted(mlp.c_fc)
    found = logits(model, ids)
    assert not close(found, before)
    text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert list(report.calls) == ["original method: modules that were replaced after the patch"]
    whf.unpatch(model)
    assert close(logits(model, ids), found)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), text)


def test_unknown_internals_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    attributes = instance_attributes(model)
    original = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, hidden_states, gate=None: original(self, hidden_states))
    with pytest.raises(ConfigError, match=rf"transformers {probe.version()} has GPT2MLP.forward\(.*gate"):
        whf.patch(model)
    assert instance_attributes(model) == attributes
    assert "mlp" not in whf.patch(model, mlp=False).replaced
    whf.unpatch(model)
    monkeypatch.undo()
    model.transformer.h[0].mlp.gate = torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"a GPT2MLP of .*gate"):
        whf.patch(model)


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="Linear is no GPT-2"):
        whf.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="mlp must be True or False"):
        whf.patch(make_model(), mlp="yes")  # type: ignore[arg-type]


def test_wrong_results_are_refused_with_the_figure(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = instance_attributes(model)
    monkeypatch.setattr(MLP, "_own", lambda self, x: torch.relu(x @ self.module.c_fc.weight + self.module.c_fc.bias))
    with pytest.raises(ConfigError, match=r"logits differ by \d"):
        whf.patch(model)
    assert instance_attributes(model) == attributes


def test_trained_weights_are_within_their_rounding() -> None:
    """Their activations are larger in places than those of random weights."""
    (model,) = as_transformers(weights.load("stories"), torch.device("cpu"), copies=1)
    report = whf.patch(model)
    assert set(report.replaced) == set(PARTS)
    assert 0 < report.difference <= report.allowed / 2


def test_fast_math_reports_its_change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whf.patch(model).fast_math_difference is None
    exact = MLP._own

    def rough(self: MLP, x: Tensor) -> Tensor:
        return exact(self, x) * (1 + 1e-3 * self.shared.fast_math)

    monkeypatch.setattr(MLP, "_own", rough)
    report = whf.patch(model, fast_math=True)
    assert report.fast_math_difference is not None
    assert report.fast_math_difference > 10 * report.allowed
    assert report.difference <= report.allowed
    assert "fast_math" in str(report)


def test_names_are_lazy_and_complete() -> None:
    for name in whf.__all__:
        assert getattr(whf, name) is not None
    assert dir(whf) == sorted(whf.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = whf.nonsense
