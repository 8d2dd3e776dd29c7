"""The strongest PyTorch we know how to write: a static KV cache and one graph per decode step, as gpt-fast has it.

Everything has a fixed shape, the position is a tensor on the device, and the next token is chosen inside the graph, so
that a step needs nothing from the host. Only operators of PyTorch; `torch.compile` may do with them what it can.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpline.bench.methods.base import COMPILE_SECONDS, Method
from warpline.bench.workloads import Case
from warpline.config import ACTIVATIONS
from warpline.model.gpt2 import activate
from warpline.model.weights import Weights


class _Block(nn.Module):
    ln_1_weight: Tensor
    ln_1_bias: Tensor
    ln_2_weight: Tensor
    ln_2_bias: Tensor
    attn_c_attn_weight: Tensor
    attn_c_attn_bias: Tensor
    attn_c_proj_weight: Tensor
    attn_c_proj_bias: Tensor
    mlp_c_fc_weight: Tensor
    mlp_c_fc_bias: Tensor
    mlp_c_proj_weight: Tensor
    mlp_c_proj_bias: Tensor
    k: Tensor
    v: Tensor

    def __init__(self, weights: Weights, layer: int, batch: int, slots: int):
        super().__init__()
        config = weights.config
        self.heads, self.epsilon = config.n_head, config.layer_norm_epsilon
        self.scale, self.activation = config.attention_scale(layer), ACTIVATIONS[config.activation_function]
        tensors = {n.removeprefix(f"h.{layer}."): t for n, t in weights.tensors.items() if n.startswith(f"h.{layer}.")}
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), tensor)
        shape = (batch, config.n_head, slots, config.head_size)
        some = weights.tensors["wte.weight"]
        self.register_buffer("k", some.new_zeros(shape))
        self.register_buffer("v", some.new_zeros(shape))

    def forward(self, x: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], self.ln_1_weight, self.ln_1_bias, self.epsilon)
        qkv = F.linear(y, self.attn_c_attn_weight, self.attn_c_attn_bias)  # [B, T, 3C]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))  # [B, H, T, D]
        self.k[:, :, position] = k
        self.v[:, :, position] = v
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            y = F.scaled_dot_product_attention(q, self.k, self.v, mask, scale=self.scale)
        x = x + F.linear(y.transpose(1, 2).flatten(-2), self.attn_c_proj_weight, self.attn_c_proj_bias)
        y = F.layer_norm(x, x.shape[-1:], self.ln_2_weight, self.ln_2_bias, self.epsilon)
        y = activate(F.linear(y, self.mlp_c_fc_weight, self.mlp_c_fc_bias), self.activation)
        return x + F.linear(y, self.mlp_c_proj_weight, self.mlp_c_proj_bias)


class StaticModel(nn.Module):
    """Ids [B, T] at `position` [T], the same for all rows → logits [B, V] of the last one. Several ids are a prompt, at
    positions 0 to T - 1: they see each other alone, which needs neither cache nor mask."""

    wte_weight: Tensor
    wpe_weight: Tensor
    ln_f_weight: Tensor
    ln_f_bias: Tensor
    head: Tensor
    seen: Tensor

    def __init__(self, weights: Weights, batch: int, slots: int, window: int | None):
        super().__init__()
        config, tensors = weights.config, weights.tensors
        self.epsilon, self.window = config.layer_norm_epsilon, window
        for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"):
            self.register_buffer(name.replace(".", "_"), tensors[name])
        self.register_buffer("head", tensors.get("lm_head.weight", tensors["wte.weight"]))
        self.blocks = nn.ModuleList(_Block(weights, layer, batch, slots) for layer in range(config.n_layer))
        seen = torch.ones(slots, slots, dtype=torch.bool, device=tensors["wte.weight"].device).tril()
        if window is not None:
            seen &= ~torch.ones_like(seen).tril(-window)
        self.register_buffer("seen", seen)

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """One pass; K and V go into the cache."""
        x = self.wte_weight[ids] + self.wpe_weight[position]
        mask = None if len(position) > 1 and self.window is None else self.seen[position]  # [T, S]
        for block in self.blocks:
            x = block(x, position, mask)
        x = F.layer_norm(x[:, -1], x.shape[-1:], self.ln_f_weight, self.ln_f_bias, self.epsilon)
        return F.linear(x, self.head)


class StaticKV(Method):
    """Eagerly."""

    title = "static KV cache, eager"
    windows = True

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        slots = min(-(-(case.prompt + case.new) // 64) * 64, weights.config.n_positions)
        self.model = StaticModel(weights, case.batch, slots, case.window).requires_grad_(False).eval()
        self.prompt_position = torch.arange(case.prompt, device=device)
        self._first: Callable[[Tensor, Tensor], Tensor] = self._next
        self._step: Callable[[Tensor, Tensor], Tensor] = self._next

    def _next(self, ids: Tensor, position: Tensor) -> Tensor:
        """The token [B, 1] behind ids."""
        logits: Tensor = self.model(ids, position)
        return logits.argmax(dim=-1, keepdim=True)

    def _decode(self, tokens: Tensor, position: Tensor) -> None:
        """Fill tokens [B, new] behind its first column, which stands at `position` [1]."""
        token = tokens[:, :1].clone()
        for i in range(1, tokens.shape[1]):
            token = self._step(token, position)
            tokens[:, i : i + 1] = token
            position = position + 1

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """The prompt in one pass, then a step per token; nothing waits for the host."""
        tokens = torch.empty(len(prompts), new, dtype=torch.long, device=self.device)
        tokens[:, :1] = self._first(prompts, self.prompt_position)
        self._decode(tokens, torch.full((1,), prompts.shape[1], device=self.device))
        return tokens

    def close(self) -> None:
        """The model holds the cache, and compiled code the model."""
        super().close()
        del self.model, self._first, self._step


class StaticKVGraph(StaticKV):
    """Each step captured once in a CUDA graph and replayed."""

    title = "static KV cache, CUDA graph"
    devices = ("cuda",)

    @torch.no_grad()
    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        self._token = torch.zeros(case.batch, 1, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._next(self._token, self._position)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._token.copy_(self._next(self._token, self._position))
            self._position.add_(1)

    def _decode(self, tokens: Tensor, position: Tensor) -> None:
        self._token.copy_(tokens[:, :1])
        self._position.copy_(position)
        for i in range(1, tokens.shape[1]):
            self._graph.replay()
            tokens[:, i : i + 1] = self._token

    def close(self) -> None:
        """The graph has memory of its own."""
        super().close()
        del self._graph


class StaticKVCompiled(StaticKV):
    """Compiled by torch, with CUDA graphs where there is CUDA: the bar."""

    title = "static KV cache, torch.compile"
    warm_up = 2
    startup_seconds = COMPILE_SECONDS

    @classmethod
    def missing(cls) -> str | None:
        """torch.compile makes C++ for a CPU."""
        if torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++"):
            return None
        return "torch.compile needs a C++ compiler here"

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        mode = "reduce-overhead" if device.type == "cuda" else "default"

        def compiled(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
            made = torch.compile(function, mode=mode, fullgraph=True, dynamic=False)
            return lambda ids, position: made(ids, position).clone()  # a graph's output is overwritten by its next run

        self._first, self._step = compiled(self._first), compiled(self._step)
