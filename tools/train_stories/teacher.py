"""The teacher: a small TinyStories language model that writes the text the story model is trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.train_stories.checkpoint import BOS, Tokenizer

NORM_EPS = 1e-5
ROPE_BASE = 10000.0
# A step attends to as many whole windows of cache slots as cover its position: a captured step has fixed shapes, but
# reading the cache is most of its cost, and early steps need not read the empty end of it.
WINDOW = 64

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class _Batch:
    """Fixed buffers of one batch size: what a step reads and writes, at addresses a CUDA graph can rely on."""

    tokens: Tensor  # (rows, context + 1): the prompts, then overwritten by what was sampled
    lengths: Tensor  # (rows,): the prompts' lengths
    position: Tensor  # (1,): the slot whose token is fed next
    sharpness: Tensor  # (): 1 / temperature
    floor: Tensor  # (): log of how likely a token must be, next to the likeliest, to be drawn at all
    cache: list[tuple[Tensor, Tensor]]  # per layer keys and values, each (rows, heads, context, head size)
    graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)


def _sample(logits: Tensor, sharpness: Tensor, floor: Tensor) -> Tensor:
    """Draw from softmax(logits * sharpness) less its tail: minus the log of exponential noise is Gumbel noise."""
    scores = logits.float() * sharpness
    noise = torch.empty_like(scores).exponential_()
    likely = scores >= scores.amax(dim=-1, keepdim=True) + floor
    return torch.argmax(torch.where(likely, scores - noise.log(), -torch.inf), dim=-1)


class Teacher:
    """The model with its tokenizer: ``generate`` writes stories by the thousand, ``nll`` scores given ones."""

    def __init__(self, tensors: dict[str, Tensor], device: str, dtype: torch.dtype) -> None:
        self.dim, _, self.layers, self.heads, _, _, self.context = (int(value) for value in tensors["header"])
        self.device, self.dtype = torch.device(device), dtype
        text = tensors["piece_bytes"].numpy().tobytes()
        ends = np.cumsum(tensors["piece_lengths"].numpy()).tolist()
        pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        self.tokenizer = Tokenizer(pieces, tensors["piece_scores"].tolist())
        self.weights = {name: t.to(self.device, dtype) for name, t in tensors.items() if t.dtype == torch.float16}
        pairs = self.dim // self.heads // 2
        angles = torch.outer(torch.arange(self.context), ROPE_BASE ** (-torch.arange(pairs) / pairs)).to(self.device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.slots = torch.arange(self.context, device=self.device)
        # A row of logits is the widest thing a step makes: compiled, drawing from it writes no further ones.
        cuda = self.device.type == "cuda"
        self._draw = torch.compile(_sample, dynamic=False) if cuda else _sample
        self._attention = SDPBackend.EFFICIENT_ATTENTION if cuda else SDPBackend.MATH
        self._batch: _Batch | None = None

    @classmethod
    def load(cls, packed_file: Path, device: str, dtype: torch.dtype) -> Teacher:
        return cls(load_file(packed_file), device, dtype)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def _logits(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Next-token logits after each of (rows, length) tokens; cos and sin are theirs, (length, pairs)."""
        w, (rows, length), norm_shape = self.weights, tokens.shape, (self.dim,)
        cos, sin = cos.view(length, 1, 1, -1), sin.view(length, 1, 1, -1)
        x = F.embedding(tokens, w["embedding"])
        for layer in range(self.layers):
            h = F.rms_norm(x, norm_shape, w["attention_norm"][layer], NORM_EPS)
            qkv = F.linear(h, w["qkv"][layer]).view(rows, length, 3, self.heads, -1)
            even, odd = qkv[:, :, :2].view(rows, length, 2, self.heads, -1, 2).unbind(-1)
            # Rotary positions: each pair of neighbours turns by the angle of its place.
            turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
            query, key = turned.transpose(1, 3).unbind(2)
            heads = attend(layer, query, key, qkv[:, :, 2].transpose(1, 2))
            x = x + F.linear(heads.transpose(1, 2).reshape(rows, length, self.dim), w["output"][layer])
            h = F.rms_norm(x, norm_shape, w["ffn_norm"][layer], NORM_EPS)
            gate, up = F.linear(h, w["gate_up"][layer]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w["down"][layer])
        return F.linear(F.rms_norm(x, norm_shape, w["norm"], NORM_EPS), w["embedding"])

    def _step(self, batch: _Batch, window: int) -> None:
        """Feed every row's token at the batch's position and fill the next slot, unless the prompt reaches there."""
        position, following = batch.position, batch.position + 1
        empty = self.slots[:window] > position
        mask = torch.zeros_like(empty, dtype=self.dtype).masked_fill_(empty, -torch.inf).view(1, 1, 1, window)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = batch.cache[layer]
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            keys, values = keys[:, :, :window], values[:, :, :window]
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

        fed = batch.tokens.index_select(1, position)
        cos, sin = self.cos.index_select(0, position), self.sin.index_select(0, position)
        drawn = self._draw(self._logits(fed, cos, sin, attend)[:, 0], batch.sharpness, batch.floor)
        given = batch.tokens.index_select(1, following)[:, 0]
        chosen = torch.where(following < batch.lengths, given, drawn)
        batch.tokens.index_copy_(1, following, chosen[:, None])
        position.add_(1)

    def _prepare(self, rows: int) -> _Batch:
        """Buffers for this many rows, and on CUDA the graphs that step them; kept until the row count changes."""
        if self._batch is not None and self._batch.lengths.numel() == rows:
            return self._batch
        self._batch = None  # frees the old buffers first
        shape = (rows, self.heads, self.context, self.dim // self.heads)

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        # Zeroed, not empty: a masked slot weighs nothing, but nothing times a stray NaN is still NaN.
        cache = [(zeros(*shape, dtype=self.dtype), zeros(*shape, dtype=self.dtype)) for _ in range(self.layers)]
        sharpness, floor = zeros(dtype=torch.float32), zeros(dtype=torch.float32)
        batch = _Batch(zeros(rows, self.context + 1), zeros(rows), zeros(1), sharpness, floor, cache)
        if self.device.type == "cuda":
            self._capture(batch)
        self._batch = batch
        return batch

    def _capture(self, batch: _Batch) -> None:
        windows = range(WINDOW, self.context + 1, WINDOW)
        for window in windows:  # compilation and library set-up must be over before a capture
            self._step(batch, window)
        pool = torch.cuda.graph_pool_handle()  # shared: results live in the batch's buffers, never in the pool
        for window in windows:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(batch, window)
            batch.graphs[window] = graph

    def generate(self, prompts: list[list[int]], temperature: float, seed: int, floor: float = 0.0) -> list[list[int]]:
        """Continue prompts (each from BOS) to the end of the story or of the context.

        Tokens less than ``floor`` times as likely as the likeliest are never drawn. A row that ended by itself has
        BOS as its last id; one cut off by the context has not.
        """
        return self.finish(self.start(prompts, temperature, seed, floor))

    @torch.no_grad()
    def start(self, prompts: list[list[int]], temperature: float, seed: int, floor: float = 0.0) -> Tensor:
        """``generate`` without waiting for the device, which goes on until ``finish`` collects the result."""
        with sdpa_kernel(self._attention):  # the one fused kernel that takes a mask; anything else would be an error
            batch = self._prepare(len(prompts))
            tokens = np.zeros(tuple(batch.tokens.shape), dtype=np.int64)
            for row, prompt in zip(tokens, prompts, strict=True):
                row[: len(prompt)] = prompt
            batch.tokens.copy_(torch.from_numpy(tokens))
            batch.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts]))
            batch.position.zero_()
            batch.sharpness.fill_(1 / temperature)
            batch.floor.fill_(math.log(floor) if floor else -math.inf)
            torch.manual_seed(seed)
            for position in range(self.context):
                window = (position // WINDOW + 1) * WINDOW
                if batch.graphs:
                    batch.graphs[window].replay()
                else:
                    self._step(batch, window)
            return batch.tokens.clone()  # the next start overwrites the buffer

    def finish(self, started: Tensor) -> list[list[int]]:
        """The rows of a started batch up to and including the BOS that closes the story, or whole."""
        tokens = started.cpu().numpy()
        closing = tokens == BOS
        closing[:, 0] = False
        ends = np.where(closing.any(axis=1), closing.argmax(axis=1) + 1, tokens.shape[1])
        return [row[:end] for row, end in zip(tokens.tolist(), ends.tolist(), strict=True)]

    @torch.no_grad()
    def nll(self, texts: list[str], rows: int = 16) -> tuple[float, int]:
        """Total negative log-likelihood in nats of story texts, and the number of characters it covers.

        A text is cut where the context ends; the end of the story is scored, though no character, where it fits.
        """
        nats, characters = 0.0, 0
        for first in range(0, len(texts), rows):
            chunk = [[*self.encode(text), BOS][: self.context + 1] for text in texts[first : first + rows]]
            characters += sum(len(self.decode(ids)) for ids in chunk)
            length = max(map(len, chunk)) - 1
            fed = torch.tensor([ids[:-1] + [0] * (length + 1 - len(ids)) for ids in chunk], device=self.device)
            wanted = torch.tensor([ids[1:] + [-100] * (length + 1 - len(ids)) for ids in chunk], device=self.device)
            logits = self._logits(fed, self.cos[:length], self.sin[:length], _causal)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100, reduction="sum")
            nats += float(loss)
        return nats, characters


def _causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)
