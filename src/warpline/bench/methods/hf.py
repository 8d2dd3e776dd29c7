"""Hugging Face transformers, with its own `generate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from warpline.bench.methods.base import COMPILE_SECONDS, Method, Watcher
from warpline.bench.workloads import Case
from warpline.model.weights import Weights, checkpoint


def as_transformers(weights: Weights, device: torch.device, attention: str = "sdpa", copies: int = 1) -> list[Any]:
    """Return `copies` transformers models that share one copy of the tensors in its layout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**weights.config.to_hf())
    state = checkpoint(weights)
    state.setdefault("lm_head.weight", weights.tensors["wte.weight"])
    models = []
    for _ in range(copies):
        with torch.device(device):  # it fills its own buffers; the parameters are replaced
            model = GPT2LMHeadModel._from_config(config, attn_implementation=attention)
        missing, _ = model.load_state_dict(state, strict=False, assign=True)
        if missing:
            raise RuntimeError(f"transformers wants parameters that are not there: {', '.join(missing[:3])}")
        model.requires_grad_(False).eval()
        model.generation_config.eos_token_id = None  # tokens that end a text do not stop it
        models.append(model)
    return models


class _Transformers(Method):
    packages = ("transformers",)
    extra = "hf"
    attention: str
    cache: str | None = None  # generate's parameter cache_implementation

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        (self.model,) = as_transformers(weights, device, self.attention)

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Generate greedily to the full length."""
        out: Tensor = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            cache_implementation=self.cache,
        )
        return out[:, prompts.shape[1] :]

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Count calls of prepare_inputs_for_generation as steps; hooks see the modules unless they were compiled."""
        with _called_before(self.model, "prepare_inputs_for_generation", watcher.step), ExitStack() as stack:
            if not self.compiled:
                stack.enter_context(_hooked(self.model, watcher))
            yield

    def close(self) -> None:
        """Release the weights and the model, which holds copies."""
        super().close()
        del self.model


class Eager(_Transformers):
    """transformers with attention in plain operators."""

    title = "transformers, eager attention"
    attention = "eager"


class Sdpa(_Transformers):
    """transformers with its default attention."""

    title = "transformers, SDPA"
    attention = "sdpa"
    serves = "padded"


class StaticCompiled(_Transformers):
    """transformers with a static cache, which makes its generate compile the forward pass."""

    title = "transformers, static cache and compile"
    attention = "sdpa"
    devices = ("cuda",)
    cache = "static"
    compiled = by_order = True
    warm_up = 2
    startup_seconds = COMPILE_SECONDS


@contextmanager
def _called_before(model: Any, name: str, call: Callable[[], None]) -> Iterator[None]:
    """Call `call` before the model's method `name` while the context is open."""
    before = getattr(model, name)

    @functools.wraps(before)  # transformers looks at its signature
    def both(*args: Any, **kwargs: Any) -> Any:
        call()
        return before(*args, **kwargs)

    object.__setattr__(model, name, both)
    try:
        yield
    finally:
        del vars(model)[name]


@contextmanager
def _hooked(model: Any, watcher: Watcher) -> Iterator[None]:
    """Enter the watcher's span around each transformers module while the context is open."""
    entered: list[AbstractContextManager[object]] = []
    hooks = []

    def enters(span: Callable[[], AbstractContextManager[object]]) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            entered.append(span())
            entered[-1].__enter__()

        return enter

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if (span := watcher.module(name)) is not None:
            hooks += [module.register_forward_pre_hook(enters(span)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
