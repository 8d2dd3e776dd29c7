"""Prompts on a CPU, through the libraries that torch brings.

The tokens of all spans stand one behind the other as rows of one matrix, so that a product reads its weights once;
attention goes span by span. Products are float32 whatever the weights are stored as.

Matrices in float32 are packed for oneDNN on first use, where there is memory for a second copy: it reads them once,
where BLAS packs them anew in every call (gpt2 on two cores: 16 tokens 18 ms instead of 45, 64 tokens 55 instead of 95),
and a row comes out the same to the bit whatever stands beside it. Other matrices are converted into the same room as
all others, some rows at a time, for BLAS.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline import hardware
from warpline.config import ACTIVATIONS
from warpline.engine.request import Span
from warpline.engine.slots import Slots
from warpline.model.gpt2 import activate, visible
from warpline.model.quantise import SCALE
from warpline.model.weights import Weights

logger = logging.getLogger(__name__)

#: Elements of a matrix that are converted at once.
_ROOM = 1 << 22
#: Of the memory that is free, what packed matrices may take.
PACKED_SHARE = 0.25
#: Tokens of a prompt as oneDNN is told when it packs; others are as fast.
_USUAL_TOKENS = 64


class CpuPrompts:
    """Fills the cache of slots."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._room: Tensor | None = None
        self._packs = can_pack(weights)
        self._packed: dict[str, Tensor] = {}

    @torch.inference_mode()
    def run(self, slots: Slots, spans: Sequence[Span]) -> Tensor:
        """Keys and values of the spans' tokens; what the last layer makes of the last token of each span that names
        lanes: [such spans, width]."""
        config, counts = self._weights.config, [span.end - span.start for span in spans]
        x = self._embedded(slots, spans)
        masks = [None if span.start == 0 and config.window is None else self._mask(span, span.start) for span in spans]
        activation = ACTIVATIONS[config.activation_function]
        for layer in range(config.n_layer):
            h = f"h.{layer}"
            qkv = self._product(f"{h}.attn.c_attn", self._normal(f"{h}.ln_1", x)).unflatten(-1, (3, config.n_head, -1))
            q, k, v = (part.split(counts, dim=1) for part in qkv.permute(1, 2, 0, 3))  # of each span [H, T, D]
            for i, span in enumerate(spans):
                slots.cache.k[layer, span.slot, :, span.start : span.end] = k[i]
                slots.cache.v[layer, span.slot, :, span.start : span.end] = v[i]
            if layer + 1 == config.n_layer:  # of which the last tokens alone are wanted
                ends = [i for i, span in enumerate(spans) if span.lanes]
                x = x[torch.tensor(counts).cumsum(0)[ends] - 1]
                if not ends:
                    break
                spans, q = [spans[i] for i in ends], [q[i][:, -1:] for i in ends]
                masks = [self._mask(span, span.end - 1) for span in spans]
            y = [self._attention(slots, layer, *each) for each in zip(spans, q, masks, strict=True)]
            x = x + self._product(f"{h}.attn.c_proj", torch.cat(y))
            hidden = activate(self._product(f"{h}.mlp.c_fc", self._normal(f"{h}.ln_2", x)), activation)
            x = x + self._product(f"{h}.mlp.c_proj", hidden)
        return x

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """What follows from what the last layer made."""
        return self._product(self._weights.head, self._normal("ln_f", x))

    def _embedded(self, slots: Slots, spans: Sequence[Span]) -> Tensor:
        t = self._weights.tensors
        ids = torch.cat([slots.tokens[span.slot, span.start : span.end] for span in spans])
        x = t["wte.weight"][ids].float()
        if (scale := t.get("wte.weight" + SCALE)) is not None:
            x *= scale[ids][:, None]
        return x.add_(torch.cat([t["wpe.weight"][span.start : span.end] for span in spans]))

    def _mask(self, span: Span, first: int) -> Tensor:
        """What the span's tokens from position `first` on may look at: [1, 1, T, end]."""
        return visible(torch.arange(first, span.end)[None], span.end, self._weights.config.window)

    def _attention(self, slots: Slots, layer: int, span: Span, q: Tensor, mask: Tensor | None) -> Tensor:
        """Queries [H, T, D] over what the cache holds, the span's own included: [T, width]. Keys and values are rounded
        as the cache rounds them, so that it does not matter in how many spans a prompt is run."""
        k, v = (kept[layer, span.slot, :, : span.end].float() for kept in (slots.cache.k, slots.cache.v))
        scale = self._weights.config.attention_scale(layer)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, is_causal=mask is None, scale=scale)
        return y[0].transpose(0, 1).flatten(1)

    def _normal(self, name: str, x: Tensor) -> Tensor:
        t = self._weights.tensors
        weight, bias = t[f"{name}.weight"].float(), t[f"{name}.bias"].float()
        return F.layer_norm(x, x.shape[-1:], weight, bias, self._weights.config.layer_norm_epsilon)

    def _product(self, name: str, x: Tensor) -> Tensor:
        t = self._weights.tensors
        stored, bias = t[f"{name}.weight"], t.get(f"{name}.bias")
        bias = None if bias is None else bias.float()
        if self._packs and name.startswith("h."):
            if (packed := self._packed.get(name)) is None:
                packed = self._packed[name] = torch.ops.mkldnn._reorder_linear_weight(stored, _USUAL_TOKENS)
            found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return found
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


def can_pack(weights: Weights) -> bool:
    """Whether the matrices of all layers may be there a second time, as oneDNN likes them."""
    matrices = [t for name, t in weights.tensors.items() if name.startswith("h.") and t.dim() == 2]
    is_known = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
    if not is_known or any(matrix.dtype != torch.float32 for matrix in matrices):
        return False
    needed, free = sum(matrix.nbytes for matrix in matrices), hardware.free_bytes("cpu")
    fits = free is None or needed <= PACKED_SHARE * free
    if not fits:
        logger.warning(
            "prompts will be slower: packed weights would take %d MB, more than a quarter of the free memory",
            needed // 10**6,
        )
    return fits
