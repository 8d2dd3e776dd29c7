"""The patch on a GPU: the same logits and tokens, our kernels where they pay off, and the promised speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warpline.hf as whf
from tests.hf.conftest import left_padded, logits, make_model, random_ids
from warpline.hf import attention, modules
from warpline.hf.gate import WORTH
from warpline.hf.measure import Measure
from warpline.hf.report import Report
from warpline.model import weights

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}


def on_gpu(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    usual = {"n_layer": 3, "n_embd": 256, "n_positions": 512, "initializer_range": 0.05}
    return make_model(**usual | changes).to("cuda", dtype)


def ours_everywhere(model: Any) -> None:
    """Run our kernels at any size."""
    model.transformer.h[0].attn.config._warpline[1].everywhere = True


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count how often each of our ways is taken."""
    calls: dict[str, int] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def count(*arguments: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, count)

    watch(attention, "_ours")
    watch(modules.MLP, "_own")
    watch(modules.MLP, "_library")
    return calls


@DTYPES
def test_everything_is_replaced_within_rounding(dtype: torch.dtype) -> None:
    model = on_gpu(dtype)
    report = whf.patch(model)
    assert set(report.replaced) == {"mlp", "layernorm", "attention", "generate"}
    assert not report.left
    assert report.difference <= report.allowed
    ids = random_ids(4, 200).cuda()
    ours_everywhere(model)
    ours = logits(model, ids).float()
    whf.unpatch(model)
    theirs = logits(model, ids).float()
    assert (ours - theirs).abs().max() <= report.allowed


@pytest.mark.parametrize("depth", [32, 64, 80])
def test_heads_of_other_sizes(depth: int) -> None:
    report = whf.patch(on_gpu(torch.float16, n_embd=4 * depth))
    assert report.difference <= report.allowed
    assert "attention" in report.replaced


@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ours_where_it_pays(
    dtype: torch.dtype, fast_math: bool, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORTH, dtype, 100 * 256)
    model = on_gpu(dtype)
    whf.patch(model, generate=False, fast_math=fast_math)
    counted.clear()
    logits(model, random_ids(2, 50).cuda())
    expected = {"_own" if fast_math else "_library": 3} | ({"_ours": 3} if dtype == torch.float32 else {})
    assert counted == expected
    counted.clear()
    logits(model, random_ids(1, 8).cuda())
    assert counted == {"_library": 3}


@DTYPES
def test_decode_kernel_behind_a_cache(dtype: torch.dtype) -> None:
    model = on_gpu(dtype)
    report = whf.patch(model, generate=False)  # its probe has such a step
    ours_everywhere(model)
    ids = random_ids(2, 300).cuda()
    with torch.no_grad():
        first = model(ids[:, :-1], use_cache=True)
        step = model(ids[:, -1:], past_key_values=first.past_key_values, use_cache=True).logits[:, -1]
    assert (step.float() - logits(model, ids)[:, -1].float()).abs().max() <= report.allowed


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_generate_writes_the_same_text(rows: int) -> None:
    model, ids = on_gpu(), random_ids(rows, 30).cuda()
    mask = left_padded(ids.cpu(), [0, *range(3, 2 + rows)]).cuda()
    before = model.generate(ids, attention_mask=mask, **GREEDY)
    report = whf.patch(model)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), before)
    assert report.calls == {"engine": 1}
    assert "copied because Conv1D" in report.replaced["generate"]


def test_moved_and_converted_after_patching() -> None:
    model = make_model(n_embd=128)
    report = whf.patch(model)
    ids = random_ids(3, 100 - 20)[:, :60]
    whole: dict[str, Any] = {"attention_mask": torch.ones_like(ids), **GREEDY}  # random tokens may include the pad
    here = model.generate(ids, **whole)
    model.cuda()
    assert torch.equal(model.generate(ids.cuda(), **whole).cpu(), here)
    before = logits(model, ids.cuda())
    model.half()
    assert (logits(model, ids.cuda()) - before).abs().max() < 0.1 * before.std() + 2**-6 * before.abs().max()
    model.generate(ids.cuda(), **whole)
    assert report.calls == {"engine": 3}


def test_changes_through_data_are_noticed() -> None:
    model, ids = on_gpu(), random_ids(1, 16).cuda()
    whf.patch(model)
    stale = model.generate(ids, **GREEDY)
    model.transformer.h[1].mlp.c_fc.weight.data.mul_(-1)
    found = model.generate(ids, **GREEDY)
    whf.unpatch(model)
    assert torch.equal(model.generate(ids, **GREEDY), found)
    assert not torch.equal(found, stale)


def test_fast_math_reports_its_change() -> None:
    report = whf.patch(on_gpu(torch.float16), fast_math=True)
    assert report.fast_math_difference is not None
    assert 0 < report.fast_math_difference < report.spread


@pytest.mark.filterwarnings("ignore")
def test_compiled_as_one_graph() -> None:
    model, ids = on_gpu(torch.float16), random_ids(2, 200).cuda()
    report = whf.patch(model, generate=False)
    plain = logits(model, ids, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert (logits(compiled, ids, use_cache=False) - plain).abs().max() <= report.allowed


@pytest.fixture(scope="module")
def measured() -> Any:
    device = torch.device("cuda")
    measure = Measure(weights.load("random:gpt2", dtype="fp16", device="cuda"), device)
    return measure.run(batch=1, prompt=16, new=100, repetitions=7, budget_seconds=20)


def speed(measured: Any, what: str, way: str) -> float:
    found = [row.sample.median for row in measured.rows if row.what.startswith(what) and row.way == way]
    return float(found[0])


@pytest.mark.alone
def test_generate_is_as_fast_as_the_engine(measured: Any) -> None:
    patched, alone, plain = (speed(measured, "generate", w) for w in ("patched", "our engine alone", "unpatched"))
    assert patched <= 1.3 * alone
    assert patched <= plain / 30


@pytest.mark.alone
@pytest.mark.parametrize("what", ["forward 1 ×", "forward 16 ×"])
def test_kernels_make_forward_passes_faster(measured: Any, what: str) -> None:
    assert speed(measured, what, "kernels only") < speed(measured, what, "unpatched")


@pytest.mark.alone
def test_kernels_never_slow_decoding_down(measured: Any) -> None:
    assert speed(measured, "generate", "kernels only") <= 1.03 * speed(measured, "generate", "unpatched")


@pytest.mark.alone
def test_report_prints(measured: Any) -> None:
    report: Report = measured.report
    print(report, *measured.rows, sep="\n")  # shown by pytest -rP
    assert "replaced  generate" in str(report)
    assert isinstance(measured.same_tokens, float)


def test_ids_elsewhere_go_to_the_original() -> None:
    """It fails or moves them, depending on the versions of transformers and torch."""
    model = on_gpu()
    ids: Tensor = random_ids(1, 8)

    def end() -> str:
        try:
            return str(model.generate(ids, **GREEDY).shape)
        except RuntimeError as error:
            return str(error)

    with pytest.warns(UserWarning, match="device type different"):
        plain = end()
    report = whf.patch(model)
    with pytest.warns(UserWarning, match="device type different"):
        assert end() == plain
    assert list(report.calls) == ["original method: input ids on another device"]


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"kv_dtype": "int8"}, {"dtype": "int8", "kv_dtype": "int8"}])
def test_generate_on_codes(options: dict[str, Any]) -> None:
    """Weights, keys and values as int8 codes: tokens near the likeliest of the model, whose own weights stay."""
    model = on_gpu(torch.float16)
    ids = random_ids(3, 40).clamp(min=1).to("cuda")  # 0 is the pad
    before = logits(model, ids)
    report = whf.patch(model, attention=False, mlp=False, layernorm=False, **options)
    assert torch.equal(logits(model, ids), before)
    found = model.generate(ids, **GREEDY)
    assert report.calls == {"engine": 1}
    seen = logits(model, found)[:, ids.shape[1] - 1 : -1].float()
    deficit = seen.amax(dim=-1) - seen.gather(-1, found[:, ids.shape[1] :, None])[..., 0]
    assert deficit.max() < report.spread
    assert deficit.mean() < report.spread / 20
