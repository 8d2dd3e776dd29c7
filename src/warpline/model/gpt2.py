"""GPT-2 in plain torch: the reference that every faster path is compared with.

Shapes in the comments: B sequences, T new tokens, S visible positions, C = n_embd, H heads of size D = C / H.
Module names are the checkpoint's, so a state dict is a checkpoint. `with during(STEP)` tells an observer the step's
name and does nothing otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpline.config import ACTIVATIONS, ModelConfig
from warpline.model import parameters as p
from warpline.model.kv_cache import KVCache
from warpline.model.observe import during


def visible(position: Tensor, span: int, window: int | None) -> Tensor:
    """Return which of the positions 0 … span-1 the tokens at `position` [B, T] may attend to: bool [B, 1, T, span]."""
    key = torch.arange(span, device=position.device)
    query = position[:, None, :, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


class Attention(nn.Module):
    """Causal self-attention; `naive` runs it step by step, as in textbooks."""

    def __init__(self, config: ModelConfig, layer: int, naive: bool):
        super().__init__()
        self.n_head, self.layer, self.naive = config.n_head, layer, naive
        self.scale = config.attention_scale(layer)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(
        self, x: Tensor, mask: Tensor | None, cache: KVCache | None, position: Tensor, slots: Tensor | None
    ) -> Tensor:
        layer = self.layer
        with during(p.QKV_PROJECTION, layer):
            qkv = self.c_attn(x)  # [B, T, 3C]
        with during(p.QKV_RESHAPE, layer):
            q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))  # [B, H, T, D]
        if cache is not None and mask is not None:
            with during(p.KV_CACHE, layer):
                k, v = cache.append(layer, k, v, position, mask.shape[-1], slots)  # [B, H, S, D]
        if self.naive:
            assert mask is not None
            with during(p.SCORES, layer):
                scores = q @ k.transpose(-2, -1) * self.scale  # [B, H, T, S]
            with during(p.MASK, layer):
                scores = scores.masked_fill(~mask, -torch.inf)
            with during(p.SOFTMAX, layer):
                weights = scores.softmax(dim=-1)
            with during(p.VALUES, layer):
                y = weights @ v  # [B, H, T, D]
        else:
            with during(p.FUSED_ATTENTION, layer):
                y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.scale)
        with during(p.OUTPUT_RESHAPE, layer):
            y = y.transpose(1, 2).flatten(-2)  # [B, T, C]
        with during(p.OUTPUT_PROJECTION, layer):
            return self.c_proj(y)


class MLP(nn.Module):
    """Two linear maps with the activation between them."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.activation = layer, ACTIVATIONS[config.activation_function]
        self.c_fc = nn.Linear(config.n_embd, config.inner)
        self.c_proj = nn.Linear(config.inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        with during(p.EXPANSION, self.layer):
            x = self.c_fc(x)  # [B, T, 4C]
        with during(p.ACTIVATION, self.layer):
            x = activate(x, self.activation)
        with during(p.PROJECTION, self.layer):
            return self.c_proj(x)


def activate(x: Tensor, name: str) -> Tensor:
    """Apply the activation that has this name in the values of `warpline.config.ACTIVATIONS`."""
    match name:
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case "tanh":
            return F.tanh(x)
    raise AssertionError(name)


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a residual around it."""

    def __init__(self, config: ModelConfig, layer: int, naive: bool):
        super().__init__()
        self.layer = layer
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, layer, naive)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config, layer)

    def forward(
        self, x: Tensor, mask: Tensor | None, cache: KVCache | None, position: Tensor, slots: Tensor | None
    ) -> Tensor:
        with during(p.LN_1, self.layer):
            y = self.ln_1(x)
        y = self.attn(y, mask, cache, position, slots)
        with during(p.RESIDUAL_1, self.layer):
            x = x + y
        with during(p.LN_2, self.layer):
            y = self.ln_2(x)
        y = self.mlp(y)
        with during(p.RESIDUAL_2, self.layer):
            return x + y


class GPT2(nn.Module):
    """The whole model, ids to logits."""

    def __init__(self, config: ModelConfig, *, naive: bool = False):
        super().__init__()
        self.config, self.naive = config, naive
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer, naive) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        start: Tensor | None = None,
        span: int | None = None,
        last: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] of `ids` [B, T], or [B, V] of row `last` [B] of each sequence.

        With a cache, sequence b uses slot slots[b] (b if None), its first token here has position start[b] (0 if None),
        and positions 0 … span-1 are visible; `span` must include every position of this call.
        """
        _, length = ids.shape
        position = torch.arange(length, device=ids.device)[None]  # [1 or B, T]
        if cache is not None:
            position = position + (ids.new_zeros(len(ids)) if start is None else start)[:, None]
        mask = None  # None is plain causal attention
        if cache is not None or self.naive or self.config.window is not None:
            mask = visible(position, length if span is None else span, self.config.window)  # [1 or B, 1, T, S]

        with during(p.EMBEDDING):
            token = self.wte(ids)  # [B, T, C]
        with during(p.POSITION):
            place = self.wpe(position)
        with during(p.ADD):
            x = token + place
        for block in self.h:
            x = block(x, mask, cache, position, slots)
        if last is not None:
            x = x[torch.arange(len(x), device=x.device), last]  # [B, C]
        with during(p.LN_F):
            x = self.ln_f(x)
        with during(p.LM_HEAD):
            return F.linear(x, self.wte.weight if self.config.tie_word_embeddings else self.lm_head.weight)
