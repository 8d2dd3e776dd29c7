"""The KV cache: keys and values of every layer, as numbers or as int8 codes with a scale for each position and head.

A row of codes (codes.py) is the key or the value of one position in one head.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from warpline.codes import decode, encode
from warpline.config import ModelConfig


class KVCache:
    """Keys and values of every layer, allocated once: [layer, slot, head, position, depth]. A sequence has one slot.

    With dtype int8 these are codes, and `scales` [layer, slot, head, position, 2] holds the scales of each position's
    key and value side by side, so that one load reads both.
    """

    def __init__(self, config: ModelConfig, slots: int, capacity: int, *, device: torch.device, dtype: torch.dtype):
        rows = (config.n_layer, slots, config.n_head, capacity)
        self.k, self.v = (_zeros((*rows, config.head_size), device, dtype) for _ in range(2))
        self.scales = _zeros((*rows, 2), device, torch.float32) if dtype == torch.int8 else None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache; their first four dimensions are the same."""
        return [self.k, self.v] if self.scales is None else [self.k, self.v, self.scales]

    def append(
        self, layer: int, k: Tensor, v: Tensor, position: Tensor, span: int, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store k and v [B, H, T, D] at `position` [B, T] of `slots` [B] (None: the first B), and return those slots'
        keys and values at 0 … span-1. Codes are returned decoded, for the new positions too, so that the result does
        not depend on how a prompt is split."""
        row = torch.arange(len(position), device=position.device) if slots is None else slots
        place, dtype = (row[:, None], slice(None), position), k.dtype

        def seen(kept: Tensor) -> Tensor:  # a view, not a copy, for the first slots
            return kept[: len(position), :, :span] if slots is None else kept[slots, :, :span]

        if self.scales is None:
            for kept, new in ((self.k[layer], k), (self.v[layer], v)):
                kept[place] = new.transpose(1, 2)
            return seen(self.k[layer]), seen(self.v[layer])
        found = []
        for which, (kept, new) in enumerate(((self.k[layer], k), (self.v[layer], v))):
            scales = self.scales[layer, ..., which : which + 1]
            codes, scale = encode(new)
            kept[place], scales[place] = codes.transpose(1, 2), scale.transpose(1, 2)
            found.append(decode(seen(kept), seen(scales)).to(dtype))
        return found[0], found[1]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros. On a CPU they take no memory and no time before they are written: there may be many slots."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    room = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(room, dtype=dtype).view(shape)
