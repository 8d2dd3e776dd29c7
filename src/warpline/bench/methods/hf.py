"""Hugging Face transformers, with its own `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warpline.bench.methods.base import COMPILE_SECONDS, Method
from warpline.bench.workloads import Case
from warpline.model.weights import Weights, checkpoint


def as_transformers(weights: Weights, device: torch.device, attention: str = "sdpa", copies: int = 1) -> list[Any]:
    """The weights as models of transformers, which share one copy of the tensors in its layout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**weights.config.to_hf())
    state = checkpoint(weights)
    state.setdefault("lm_head.weight", weights.tensors["wte.weight"])
    models = []
    for _ in range(copies):
        with torch.device(device):  # its buffers are its own affair; the parameters are replaced
            model = GPT2LMHeadModel._from_config(config, attn_implementation=attention)
        missing, _ = model.load_state_dict(state, strict=False, assign=True)
        if missing:
            raise RuntimeError(f"transformers wants parameters that are not there: {', '.join(missing[:3])}")
        model.requires_grad_(False).eval()
        model.generation_config.eos_token_id = None  # a text's end is a token like any other here
        models.append(model)
    return models


class _Transformers(Method):
    packages = ("transformers",)
    extra = "hf"
    attention: str
    cache: str | None = None  # what generate calls cache_implementation

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        (self.model,) = as_transformers(weights, device, self.attention)

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Greedy, to the full length."""
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

    def close(self) -> None:
        """The model holds copies."""
        super().close()
        del self.model


class Eager(_Transformers):
    """Attention in plain operators."""

    title = "transformers, eager attention"
    attention = "eager"


class Sdpa(_Transformers):
    """Its default."""

    title = "transformers, SDPA"
    attention = "sdpa"


class StaticCompiled(_Transformers):
    """Static cache, which makes its generate compile the forward pass."""

    title = "transformers, static cache and compile"
    attention = "sdpa"
    devices = ("cuda",)
    cache = "static"
    warm_up = 2
    startup_seconds = COMPILE_SECONDS
