"""`patch`, `unpatch` and `patched`: they set attributes of instances, compare logits, and can undo everything.

Only attributes of this model's own modules are changed: no class, no parameter, no buffer, no shared config. So saving,
moving, converting and copying a patched model works as it does for any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from warpline.errors import ConfigError, KernelError, WarplineError
from warpline.hf import attention as attentions
from warpline.hf import probe
from warpline.hf.gate import DEVICES, DTYPES, Forward, Shared
from warpline.hf.generate import Generate
from warpline.hf.modules import MLP, LayerNorm
from warpline.hf.report import Report
from warpline.hf.runner import PLAIN, Codes

#: The attribute of a model that holds its patch.
RECORD = "_warpline_patch"


@dataclass(slots=True)
class Patch:
    """The options, and how to undo them: (module, attribute, old value, whether there was one)."""

    options: dict[str, Any]
    report: Report
    undo: list[tuple[nn.Module, str, Any, bool]] = field(default_factory=list)

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of this instance alone."""
        self.undo.append((module, name, module.__dict__.get(name), name in module.__dict__))
        module.__dict__[name] = value

    def take_back(self) -> None:
        """Restore every attribute."""
        while self.undo:
            module, name, before, there = self.undo.pop()
            if there:
                module.__dict__[name] = before
            else:
                module.__dict__.pop(name, None)


def patch(
    model: Any,
    *,
    attention: bool = True,
    mlp: bool = True,
    layernorm: bool = True,
    generate: bool = True,
    fast_math: bool = False,
    sampling: bool = False,
    dtype: str | None = None,
    kv_dtype: str | None = None,
) -> Report:
    """Replace the parts of a transformers GPT-2 that Warpline computes faster, and report each of them.

    The patched model's logits are compared with the original's; if they differ by more than the dtype's rounding
    explains, everything is undone and a ConfigError says by how much. `fast_math` lets GELU use the GPU's
    approximate tanh. `sampling` lets `generate(do_sample=True)` run on our engine too, with other random numbers than
    transformers draws. `dtype="int8"` and `kv_dtype="int8"` make `generate` run on int8 copies of the matrices and,
    on a GPU, with an int8 KV cache; the model keeps its weights. A model that is already patched is unpatched first.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> import warpline.hf as whf
        >>> _ = torch.manual_seed(0)
        >>> config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, bos_token_id=99, eos_token_id=99)
        >>> model = GPT2LMHeadModel(config).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> asked = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0)
        >>> before = model.generate(ids, **asked)
        >>> report = whf.patch(model)
        >>> torch.equal(model.generate(ids, **asked), before)
        True
        >>> whf.unpatch(model)
        True
    """
    options = {
        "attention": attention, "mlp": mlp, "layernorm": layernorm, "generate": generate, "fast_math": fast_math,
        "sampling": sampling,
    }  # fmt: skip
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, not {value!r}")
    codes = _codes(dtype, kv_dtype, generate=generate)
    base = probe.base_of(model)
    unpatch(model)
    some = base.wte.weight
    stored = DTYPES.get(some.dtype)
    if stored is None:
        raise ConfigError(f"the model is in {some.dtype}: convert it to float32, float16 or bfloat16 first")
    if some.device.type not in DEVICES:
        raise ConfigError(f"the model is on {some.device.type}: move it to cpu or cuda first")
    report = Report(probe.version(), stored, str(some.device))
    record, shared = Patch(options | codes._asdict(), report), Shared(fast_math=False)
    asked = model if _is_lm(model) else base
    before = probe.look(asked, base)
    report.spread, report.allowed = before.spread, before.allowed(some.dtype, len(base.h))
    try:
        _replace(model, base, record, shared)
        report.difference = _difference(before, asked, base, shared)
        if not report.difference <= report.allowed:
            raise ConfigError(
                f"the patched model's logits differ by {report.difference:.3g}, but {stored} explains at most "
                f"{report.allowed:.3g} (transformers {report.transformers}): the model is left as it was"
            )
        if fast_math:
            shared.fast_math = True
            report.fast_math_difference = _difference(before, asked, base, shared)
        _take_over(model, record, shared, codes)
    except BaseException:
        record.take_back()
        raise
    model.__dict__[RECORD] = record
    return report


def _difference(before: probe.Seen, asked: Any, base: Any, shared: Shared) -> float:
    """Return the larger difference of two runs, with our kernels everywhere and only where they are worth it."""
    found = []
    for shared.everywhere in (True, False):
        found.append(before.difference(probe.look(asked, base)))
    return max(found)


def unpatch(model: Any) -> bool:
    """Undo the patch; return whether there was one."""
    record = model.__dict__.pop(RECORD, None)
    if record is not None:
        record.take_back()
    return record is not None


@contextmanager
def patched(model: Any, **options: Any) -> Iterator[Report]:
    """Patch the model inside the block; afterwards it is as before, patched or not."""
    outer = model.__dict__.get(RECORD)
    report = patch(model, **options)
    try:
        yield report
    finally:
        unpatch(model)
        if outer is not None:
            patch(model, **outer.options)


def _is_lm(model: Any) -> bool:
    from transformers import GPT2LMHeadModel

    return isinstance(model, GPT2LMHeadModel)


def _replace(model: Any, base: Any, record: Patch, shared: Shared) -> None:
    options, left = record.options, record.report.left
    missing = _obstacle(base)
    parts: dict[str, list[nn.Module]] = {
        "mlp": [block.mlp for block in base.h],
        "layernorm": [norm for block in base.h for norm in (block.ln_1, block.ln_2)] + [base.ln_f],
        "attention": [block.attn for block in base.h],
    }
    for part, modules in parts.items():
        if not options[part]:
            left[part] = "not asked for"
        elif missing is not None:
            left[part] = missing
        else:
            _replace_part(part, modules, model.config, record, shared)
    if options["attention"] and any(hasattr(block, "crossattention") for block in base.h):
        left["crossattention"] = "our kernels are causal"


def _replace_part(part: str, modules: list[nn.Module], config: Any, record: Patch, shared: Shared) -> None:
    """Replace all modules of one kind; the report says why some could not be."""
    done, report = 0, record.report
    named = attentions.named_config(config, shared) if part == "attention" else None
    kinds: dict[str, type[Forward]] = {"mlp": MLP, "layernorm": LayerNorm}
    for module in modules:
        if part == "attention":
            why = probe.check_attention(module, config)
        else:
            why = probe.check_mlp(module) if part == "mlp" else probe.check_layernorm(module)
        if why is not None:
            report.left[part] = why
        elif named is not None:
            attentions.register()
            record.put(module, "config", named)
            done += 1
        else:
            record.put(module, "forward", kinds[part](module, shared))
            done += 1
    if done:
        report.replaced[part] = f"{done} of {len(modules)}, {_DOES[part]}"


_DOES = {
    "mlp": "bias and GELU in one pass: on a GPU in the first product's epilogue, with fast_math by our kernel",
    "layernorm": "our kernel where the GPU is busier than the host; the residual before it is added by the block",
    "attention": "our kernels in float32 where the GPU is busier than the host; else, and with masks, the model's own",
}


def _obstacle(base: Any) -> str | None:
    """Return why our kernels cannot run on the model's device; None if they can."""
    norm = base.ln_f
    try:
        with torch.no_grad():
            torch.ops.warpline.layernorm(torch.zeros_like(norm.weight)[None], norm.weight, norm.bias, 1e-5)
    except (KernelError, ImportError) as error:
        return str(error).splitlines()[0]
    return None


def _codes(dtype: str | None, kv_dtype: str | None, *, generate: bool) -> Codes:
    for name, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if value not in (None, "int8"):
            raise ConfigError(f'{name} is "int8" or left out, not {value!r}: the model has its own dtype')
        if value is not None and not generate:
            raise ConfigError(f"{name} is for generate, which generate=False leaves alone")
    return Codes(dtype, kv_dtype)


def _take_over(model: Any, record: Patch, shared: Shared, codes: Codes) -> None:
    """Run `generate` on the engine, if its tokens are the model's. Codes round further than the model's dtype: there
    the limit is the spread of the logits."""
    report, rounded = record.report, codes != PLAIN
    why = _not_for_engine(model) if record.options["generate"] else "not asked for"
    if why is not None:
        if rounded:
            raise ConfigError(f"generate cannot run on int8 codes: {why}")
        report.left["generate"] = why
        return
    method = Generate(model, shared, report, sampling=record.options["sampling"], codes=codes)
    try:
        with probe.at_rest(model):
            runner = method.renew(_usual_eos(model))
            deficit = probe.judge(model, runner)
    except WarplineError as error:
        if rounded:
            raise
        report.left["generate"] = str(error)
        return
    allowed, why = (report.spread, "int8") if rounded else (2 * report.allowed, report.dtype)
    if not deficit <= allowed:
        raise ConfigError(
            f"the engine chose a token whose logit is {deficit:.3g} below the model's likeliest, but {why} "
            f"explains at most {allowed:.3g} (transformers {report.transformers}): "
            + ("leave out dtype and kv_dtype" if rounded else "pass generate=False")
        )
    record.put(model, "generate", method)
    drawn = "greedy and sampled" if record.options["sampling"] else "greedy (sampling=True for sampling as well)"
    report.replaced["generate"] = f"{drawn} on {runner.described}; other arguments go to the original method"
    if rounded:
        found = ", ".join(f"{name}={value}" for name, value in codes._asdict().items() if value is not None)
        report.replaced["generate"] += f"; {found}: a token's logit was at most {deficit:.3g} below the likeliest"


def _usual_eos(model: Any) -> int | None:
    eos = model.generation_config.eos_token_id
    return eos if isinstance(eos, int) else None


def _not_for_engine(model: Any) -> str | None:
    if not _is_lm(model):
        return f"{type(model).__name__} is no language model"
    from transformers import GenerationMixin, GPT2LMHeadModel

    kind = type(model)
    if kind.generate is not GenerationMixin.generate or kind.forward is not GPT2LMHeadModel.forward:
        return f"{kind.__name__} has a generate or forward of its own"
    if "generate" in model.__dict__ or "forward" in model.__dict__:
        return "generate or forward has been replaced by something else"
    if not hasattr(model, "_prepare_generation_config"):
        raise probe.unknown("a generate without _prepare_generation_config")
    config = model.config
    if getattr(config, "sliding_window", None) or getattr(config, "add_cross_attention", False):
        return "the config asks for a sliding window or for cross-attention"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "the config asks for attention that is upcast"
    if model.lm_head.bias is not None:
        return "the head has a bias"
    return None
