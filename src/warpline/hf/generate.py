"""`model.generate(...)` on our engine for the arguments it supports; the original method for all others.

Greedy decoding is always taken over: the tokens are the same unless two logits are equal within rounding. Sampling
draws other random numbers than transformers does, so it is taken over only if the patch was made with `sampling=True`;
its seeds then come from torch's generator, and torch.manual_seed repeats a text.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from warpline.config import SamplingParams
from warpline.engine.request import Request
from warpline.errors import ConfigError
from warpline.hf.gate import DEVICES, DTYPES, Forward, Shared
from warpline.hf.report import Report
from warpline.hf.runner import Codes, Runner
from warpline.hf.weights import held, walk

#: Settings of a GenerationConfig that are translated below, or that do not change our result.
TRANSLATED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "repetition_penalty", "num_return_sequences", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache",
    "transformers_version",
    # Used by beams, assistants or compilation only, which other settings request and we refuse.
    "early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "disable_compile",
    "compile_config",
}  # fmt: skip
#: Supported arguments of the forward pass.
INPUTS = {"input_ids", "attention_mask"}


class NotOursError(Exception):
    """The engine does not support an argument; the text names it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A translated call of `generate`."""

    ids: Tensor  # [B, T], pads included
    requests: list[Request]
    copies: int  # sequences returned for each row
    eos: int | None
    pad: int | None


class Generate:
    """Replaces `model.generate`, as an attribute of that instance. Copies and pickles of the model take it along
    without the engine, and make their own when they need it."""

    def __init__(self, model: nn.Module, shared: Shared, report: Report, *, sampling: bool, codes: Codes):
        self.model, self.shared, self.report, self.sampling, self.codes = model, shared, report, sampling, codes
        self.kinds = [type(module) for module in walk(model)]
        self.runner: Runner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "runner": None}

    def __call__(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """Generate on the engine or with the original method; the report counts both."""
        model: Any = self.model
        if model.training:
            self.shared.tell("the model is in train mode, so its original code runs: call model.eval() for the engine")
        modules = walk(model)
        try:
            _check_model(model, modules, self.kinds)
            job = translate(model, inputs, kwargs, sampling=self.sampling)
        except NotOursError as reason:
            self.report.count(f"original method: {reason}")
            return type(model).generate(model, inputs, **kwargs)
        self.report.count("engine")
        with torch.no_grad():
            return assemble(job, self._tokens(job, modules))

    def _tokens(self, job: Job, modules: list[nn.Module]) -> list[list[int]]:
        """Generate, and check while the GPU decodes whether the model has changed since the engine was made."""
        runner = self.runner
        if runner is not None and job.eos in (None, runner.eos):
            found = runner.run(job.requests, still=lambda: runner.serves(modules))
            if found is not None:
                return found
        tokens = self.renew(job.eos).run(job.requests)
        assert tokens is not None
        return tokens

    def renew(self, eos: int | None) -> Runner:
        """Make an engine over the model in its present state."""
        self.runner = None  # frees its memory before the new one is allocated
        with torch.inference_mode(False):  # later calls use its allocations too
            self.runner = Runner(self.model, eos, self.codes)
        return self.runner


def translate(model: Any, inputs: Tensor | None, kwargs: dict[str, Any], *, sampling: bool) -> Job:
    """Translate the call into requests to the engine; raise `NotOursError` if that is impossible."""
    given = dict(kwargs)
    config = given.pop("generation_config", None)
    named = [name for name, value in given.items() if value is not None and name in _METHOD_ARGUMENTS]
    if named:
        raise NotOursError(", ".join(named))
    for name in _METHOD_ARGUMENTS:
        given.pop(name, None)
    settings, forward = model._prepare_generation_config(config, **given)
    _check_settings(settings)
    ids = forward.get("input_ids") if inputs is None else inputs
    strange = [name for name, value in forward.items() if name not in INPUTS and value is not None]
    if strange or (inputs is not None and forward.get("input_ids") is not None):
        raise NotOursError(", ".join(strange) or "inputs given twice")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise NotOursError("no input ids of two dimensions")
    if ids.device != model.device:
        raise NotOursError("input ids on another device")
    new = settings.max_new_tokens
    if new is None and (kwargs.get("max_length") is not None and config is None):
        new = settings.max_length - ids.shape[1]
    if new is None:
        raise NotOursError("neither max_new_tokens nor max_length")
    eos, pad = _one(settings.eos_token_id, "eos_token_id"), _one(settings.pad_token_id, "pad_token_id")
    rows = _unpadded(ids, forward.get("attention_mask"), pad, eos)
    params = _params(settings, new, ids.shape[1], eos, sampling=sampling)
    context = model.config.n_positions
    if not 0 < new <= context - max(map(len, rows)):
        raise NotOursError(f"{new} new tokens do not fit into the context of {context}")
    if params.repetition_penalty != 1 and any(len(row) != ids.shape[1] for row in rows):
        raise NotOursError("repetition_penalty with padding, where transformers penalises the pads as well")
    vocabulary = model.config.vocab_size
    if not all(row.min() >= 0 and row.max() < vocabulary for row in rows):
        raise NotOursError(f"token ids outside the vocabulary of {vocabulary}")
    copies = settings.num_return_sequences or 1
    if copies > 1 and params.temperature == 0:
        raise NotOursError("num_return_sequences without sampling")
    seed = int(torch.randint(2**62, ())) if params.temperature else 0  # so that torch.manual_seed repeats it
    # The request's number selects a random stream, so that equal prompts draw independently.
    requests = [
        Request(row, params, seed, number * copies + sample, len(row) + new)
        for number, row in enumerate(rows)
        for sample in range(copies)
    ]
    return Job(ids, requests, copies, eos, eos if pad is None else pad)


#: Arguments of `generate` itself that do not belong to the GenerationConfig.
_METHOD_ARGUMENTS = (
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "streamer",
    "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate", "use_model_defaults", "tokenizer",
    "assistant_tokenizer", "trust_remote_code",
)  # fmt: skip


def _check_model(model: Any, modules: list[nn.Module], kinds: list[type]) -> None:
    if model.training:
        raise NotOursError("train mode")
    if model.dtype not in DTYPES or model.device.type not in DEVICES:
        raise NotOursError(f"{model.dtype} on {model.device.type}")
    if torch.is_autocast_enabled(model.device.type):
        raise NotOursError("autocast")
    if torch.compiler.is_compiling():
        raise NotOursError("torch.compile")
    if [type(module) for module in modules] != kinds:
        raise NotOursError("modules that were replaced after the patch")
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotOursError("modules with hooks, which the engine would not call")
        if "forward" in module.__dict__ and not isinstance(module.__dict__["forward"], Forward):
            raise NotOursError("modules with a forward that other code has replaced")
    if {p.device for p in held(modules)} != {model.device}:
        raise NotOursError("parameters on several devices")


def _check_settings(settings: Any) -> None:
    """Raise if a setting that is not translated differs from its neutral value."""
    neutral = _neutral(cast(Hashable, type(settings)))
    for name, value in vars(settings).items():
        if name.startswith("_") or name in TRANSLATED or value in (None, False) or value == neutral.get(name):
            continue
        raise NotOursError(name)
    if settings.use_cache is False:
        raise NotOursError("use_cache=False")


@functools.cache
def _neutral(kind: Any) -> dict[str, Any]:
    """Return the default values of the settings."""
    usual = kind()
    values: dict[str, Any] = usual.to_dict()
    defaults = getattr(usual, "_get_default_generation_params", dict)
    return values | {name: value for name, value in defaults().items() if values.get(name) is None}


def _one(value: Any, name: str) -> int | None:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if len(value) > 1:
            raise NotOursError(f"several {name}")
        value = value[0] if value else None
    return None if value is None else int(value)


def _unpadded(ids: Tensor, mask: Tensor | None, pad: int | None, eos: int | None) -> list[np.ndarray]:
    """Return the rows without the padding on their left."""
    rows = ids.cpu().numpy()
    if mask is None:
        if pad is not None and pad != eos and (rows == pad).any():
            raise NotOursError("pads without an attention_mask")
        return list(rows)
    if mask.shape != ids.shape:
        raise NotOursError("an attention_mask of another shape")
    marks = mask.cpu().numpy()
    counts = (marks == 1).sum(axis=1)
    if not counts.all() or (marks != (np.arange(ids.shape[1]) >= ids.shape[1] - counts[:, None])).any():
        raise NotOursError("an attention_mask that hides more than pads on the left")
    return [row[len(row) - count :] for row, count in zip(rows, counts, strict=True)]


def _params(settings: Any, new: int, length: int, eos: int | None, *, sampling: bool) -> SamplingParams:
    if settings.do_sample and not sampling:
        raise NotOursError("do_sample, whose random numbers would differ: patch with sampling=True to allow it")
    least = settings.min_new_tokens
    if least is None:
        least = max(0, (settings.min_length or 0) - length)
    if least and eos is None:
        least = 0  # nothing ends a text early
    usual = {
        "max_tokens": max(new, 1),
        "min_tokens": min(least, max(new, 1)),
        "repetition_penalty": 1.0 if settings.repetition_penalty is None else settings.repetition_penalty,
        "ignore_eos": eos is None,
        "temperature": 0.0,
        "top_p": 1.0,
    }
    if settings.do_sample:
        usual |= {
            "temperature": 1.0 if settings.temperature is None else settings.temperature,
            "top_k": settings.top_k or 0,
            "top_p": 1.0 if settings.top_p is None else settings.top_p,
            "min_p": settings.min_p or 0.0,
        }
    try:
        return SamplingParams(**usual)
    except ConfigError as error:  # transformers may support what we refuse
        raise NotOursError(str(error)) from None


def assemble(job: Job, new: list[list[int]]) -> Tensor:
    """Return what transformers returns: the given ids, the new tokens, and padding after rows that ended early."""
    longest = max(map(len, new))
    filled = [tokens + [job.pad or 0] * (longest - len(tokens)) for tokens in new]
    behind = torch.tensor(filled, dtype=job.ids.dtype, device=job.ids.device)
    return torch.cat((job.ids.repeat_interleave(job.copies, dim=0), behind), dim=1)
