"""Prompts on a CPU, through the BLAS that torch brings.

Products are float32 whatever the weights are stored as: a matrix that is not is converted into the same room as all
others, some rows at a time. Usually only keys and values are wanted, and the last token of a prompt is left to the
decode step; as long as that is not compiled, the logits behind a prompt come from here as well.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.config import ACTIVATIONS
from warpline.engine.state import State
from warpline.model.gpt2 import activate, visible
from warpline.model.quantise import SCALE
from warpline.model.weights import Weights

#: Elements of a matrix that are converted at once.
_ROOM = 1 << 22


class CpuPrompts:
    """Fills a state's cache."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._room: Tensor | None = None

    @torch.inference_mode()
    def run(self, state: State) -> None:
        """All tokens but the last of every prompt; what a shorter one has behind its end is overwritten later."""
        if state.longest > 1:
            self._layers(state, state.longest - 1, None)

    @torch.inference_mode()
    def logits(self, state: State) -> Tensor:
        """All tokens, and what follows the last of every prompt."""
        x = self._layers(state, state.longest, state.length[: state.batch] - 1)
        return self._product(self._weights.head, self._normal("ln_f", x[:, 0]))

    def _layers(self, state: State, length: int, last: Tensor | None) -> Tensor:
        """Keys and values of `length` tokens, and what the last layer makes of the positions `last` [B], if any are
        wanted."""
        config, t = self._weights.config, self._weights.tensors
        batch, heads = state.batch, config.n_head
        ids = state.tokens[:batch, :length]
        x = t["wte.weight"][ids].float()
        if (scale := t.get("wte.weight" + SCALE)) is not None:
            x *= scale[ids][..., None]
        x += t["wpe.weight"][:length].float()
        position = torch.arange(length)[None]
        mask = None if config.window is None else visible(position, length, config.window)
        activation = ACTIVATIONS[config.activation_function]
        for layer in range(config.n_layer):
            h = f"h.{layer}"
            qkv = self._product(f"{h}.attn.c_attn", self._normal(f"{h}.ln_1", x))
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
            state.cache.k[layer, :batch, :, :length].copy_(k)
            state.cache.v[layer, :batch, :, :length].copy_(v)
            if layer + 1 == config.n_layer:
                if last is None:
                    break
                rows = torch.arange(batch)
                x, q = x[rows, last][:, None], q[rows, :, last][:, :, None]
                mask = visible(last[:, None], length, config.window)
            y = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=config.attention_scale(layer)
            )
            x = x + self._product(f"{h}.attn.c_proj", y.transpose(1, 2).flatten(-2))
            hidden = activate(self._product(f"{h}.mlp.c_fc", self._normal(f"{h}.ln_2", x)), activation)
            x = x + self._product(f"{h}.mlp.c_proj", hidden)
        return x

    def _normal(self, name: str, x: Tensor) -> Tensor:
        t = self._weights.tensors
        weight, bias = t[f"{name}.weight"].float(), t[f"{name}.bias"].float()
        return F.layer_norm(x, x.shape[-1:], weight, bias, self._weights.config.layer_norm_epsilon)

    def _product(self, name: str, x: Tensor) -> Tensor:
        t = self._weights.tensors
        stored, bias = t[f"{name}.weight"], t.get(f"{name}.bias")
        bias = None if bias is None else bias.float()
        if stored.dtype == torch.float32:
            return F.linear(x, stored, bias)
        outputs, inputs = stored.shape
        rows = max(1, _ROOM // inputs)
        if self._room is None:
            self._room = torch.empty(_ROOM)
        y = x.new_empty(*x.shape[:-1], outputs)
        for first in range(0, outputs, rows):
            some = stored[first : first + rows]
            y[..., first : first + rows] = F.linear(x, self._room[: some.numel()].view(some.shape).copy_(some))
        if (scale := t.get(f"{name}.weight{SCALE}")) is not None:
            y *= scale
        return y if bias is None else y.add_(bias)
