"""Attention through `AttentionInterface`: our kernels where only causality hides keys, the model's own function
everywhere else.

A patched model keeps its config, and with it its mask function; only its attention modules see a config that names our
function. So a mask always has the form that the original function understands, and no other model with this config is
affected. Our name has a mask function as well: without one, transformers passes no mask for padded batches, and the
logits are wrong without an error.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from warpline.errors import ConfigError
from warpline.hf.gate import Shared, is_worth_it, obstacle
from warpline.kernels import torch_ops

#: The name of our function and its masks in transformers.
NAME = "warpline"
#: The import registers the operators.
OPERATORS = torch_ops.OPERATORS
#: Arguments that do not change what attention computes.
HARMLESS = {"use_cache", "position_ids", "cache_position", "output_hidden_states", "return_dict", "logits_to_keep"}
#: In float32, a decode step's attention uses our operator from this many bytes of keys and values on: below, the GPU
#: waits for the host, and torch's own operator takes less of the host's time. On an H200 a step of 64 sequences over
#: 1,000 positions (375 MiB) takes 94 µs, torch's 404.
DECODE_BYTES = 256 << 20


def register() -> str:
    """Register the attention and its mask function with transformers; return the name, for `attn_implementation`."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ConfigError(f"this transformers has no attention interface ({error}): install 4.57 or newer") from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    return NAME


def named_config(config: Any, shared: Shared) -> Any:
    """Return a copy of `config` for the attention modules, which only read the name of their function from it."""
    named = copy.copy(config)
    named._attn_implementation_internal = NAME
    named._warpline = (config, shared)
    return named


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as `AttentionInterface` defines it: `[B, H, T, D]` in, `[B, T, H, D]` out."""
    real, shared = getattr(module.config, "_warpline", (None, None))
    usual = attention_mask is None and not dropout and not getattr(module, "is_cross_attention", False)
    usual = usual and all(name in HARMLESS or value is None or value is False for name, value in kwargs.items())
    if query.shape[2] > 1 and is_causal is False:
        usual = False
    if usual and _is_ours(query, key, shared):
        why = obstacle(module, query, key, value)
        if why is None:
            return _ours(query, key, value, scaling), None
        if shared is not None and not torch.compiler.is_compiling():
            shared.tell(why)
    # Arguments that were not given are not passed on: the original functions have their own defaults.
    given = {"scaling": scaling, "is_causal": is_causal}
    kwargs |= {name: value for name, value in given.items() if value is not None}
    return _behind(real)(module, query, key, value, attention_mask, dropout=dropout, **kwargs)  # type: ignore[no-any-return]


def _is_ours(query: Tensor, key: Tensor, shared: Shared | None) -> bool:
    """Whether our kernel is the faster one. In half precision torch's FlashAttention is: 16 × 1,024 positions of gpt2
    take 83 µs on an H200, ours 116; in float32 torch has none, and 1 × 1,024 take 142 µs, ours 77."""
    if not query.is_cuda or (shared is not None and shared.everywhere):
        return True
    if query.dtype != torch.float32:
        return False
    if query.shape[2] > 1:
        return is_worth_it(query, shared)
    return 2 * key.numel() * key.element_size() >= DECODE_BYTES


def _ours(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend without a mask: a single query sees every key, several see the keys up to their own position."""
    batch, queries = query.shape[0], query.shape[2]
    keys = key.shape[2] if queries == 1 else queries  # a static cache has empty slots after the prompt
    length = torch.full((batch,), keys, dtype=torch.int64, device=query.device)
    op = torch.ops.warpline.decode_attention if queries == 1 else torch.ops.warpline.flash_attention
    return op(query, key[:, :, :keys], value[:, :, :keys], length, 0, scaling)  # type: ignore[no-any-return]


def _behind(config: Any) -> Any:
    """Return the function that the model would call without the patch."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = "sdpa" if config is None else config._attn_implementation
    if name == "eager":  # chosen after the patch; each model class has its own
        from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward

        return eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]
