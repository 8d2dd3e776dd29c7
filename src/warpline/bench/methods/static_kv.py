"""The strongest PyTorch we know how to write: a static KV cache and one graph per decode step, as gpt-fast does it.

Everything has a fixed shape, the position is a tensor on the device, and the next token is chosen inside the graph, so
that a step needs nothing from the host. It uses only operators of PyTorch, which `torch.compile` may fuse.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpline.bench.methods.base import COMPILE_SECONDS, InInt8, Method, Watcher
from warpline.bench.workloads import Case
from warpline.config import ACTIVATIONS
from warpline.model.gpt2 import activate
from warpline.model.weights import Weights


class _Product(nn.Module):
    """x weight^T + bias; int8 codes are multiplied first and the sum scaled after, as in gpt-fast."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weights: Weights, name: str, *, bias: bool = True):
        super().__init__()
        matrix = weights.matrix(f"{name}.weight")
        self.register_buffer("weight", matrix.codes)
        self.register_buffer("scale", None if matrix.scale is None else matrix.scale.to(weights.activations))
        self.register_buffer("bias", weights.tensors[f"{name}.bias"] if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


class _Block(nn.Module):
    ln_1_weight: Tensor
    ln_1_bias: Tensor
    ln_2_weight: Tensor
    ln_2_bias: Tensor
    k: Tensor
    v: Tensor

    def __init__(self, weights: Weights, layer: int, batch: int, slots: int):
        super().__init__()
        config = weights.config
        self.heads, self.epsilon = config.n_head, config.layer_norm_epsilon
        self.scale, self.activation = config.attention_scale(layer), ACTIVATIONS[config.activation_function]
        h = f"h.{layer}"
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            self.register_buffer(name.replace(".", "_"), weights.tensors[f"{h}.{name}"])
        self.c_attn, self.attn_c_proj = (_Product(weights, f"{h}.attn.{name}") for name in ("c_attn", "c_proj"))
        self.c_fc, self.mlp_c_proj = (_Product(weights, f"{h}.mlp.{name}") for name in ("c_fc", "c_proj"))
        shape = (batch, config.n_head, slots, config.head_size)
        self.register_buffer("k", weights.room(*shape).zero_())
        self.register_buffer("v", weights.room(*shape).zero_())

    def forward(self, x: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], self.ln_1_weight, self.ln_1_bias, self.epsilon)
        qkv = self.c_attn(y)  # [B, T, 3C]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))  # [B, H, T, D]
        self.k[:, :, position] = k
        self.v[:, :, position] = v
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            y = F.scaled_dot_product_attention(q, self.k, self.v, mask, scale=self.scale)
        x = x + self.attn_c_proj(y.transpose(1, 2).flatten(-2))
        y = F.layer_norm(x, x.shape[-1:], self.ln_2_weight, self.ln_2_bias, self.epsilon)
        result: Tensor = x + self.mlp_c_proj(activate(self.c_fc(y), self.activation))
        return result


class StaticModel(nn.Module):
    """Ids [B, T] at `position` [T], the same for all rows → logits [B, V] of the last one. Several ids are a prompt at
    positions 0 to T - 1: they attend only to each other, which needs neither cache nor mask."""

    wte_weight: Tensor
    wte_scale: Tensor | None
    wpe_weight: Tensor
    ln_f_weight: Tensor
    ln_f_bias: Tensor
    seen: Tensor

    def __init__(self, weights: Weights, batch: int, slots: int, window: int | None):
        super().__init__()
        config, tensors = weights.config, weights.tensors
        self.epsilon, self.window = config.layer_norm_epsilon, window
        for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"):
            self.register_buffer(name.replace(".", "_"), tensors[name])
        self.register_buffer("wte_scale", weights.matrix("wte.weight").scale)
        self.head = _Product(weights, weights.head, bias=False)
        self.blocks = nn.ModuleList(_Block(weights, layer, batch, slots) for layer in range(config.n_layer))
        seen = torch.ones(slots, slots, dtype=torch.bool, device=weights.device).tril()
        if window is not None:
            seen &= ~torch.ones_like(seen).tril(-window)
        self.register_buffer("seen", seen)

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """Run one pass; K and V go into the cache."""
        x = self.wte_weight[ids]
        if self.wte_scale is not None:
            x = (x * self.wte_scale[ids][..., None]).to(self.wpe_weight.dtype)
        x = x + self.wpe_weight[position]
        mask = None if len(position) > 1 and self.window is None else self.seen[position]  # [T, S]
        for block in self.blocks:
            x = block(x, position, mask)
        x = F.layer_norm(x[:, -1], x.shape[-1:], self.ln_f_weight, self.ln_f_bias, self.epsilon)
        logits: Tensor = self.head(x)
        return logits


#: Maps ids [B, T] at positions [T] to the next token [B, 1].
Next = Callable[[Tensor, Tensor], Tensor]
Mark = Callable[[], None]


class _Graphs:
    """The prompt's pass and a decode step, each captured once in a CUDA graph with fixed input and output tensors.
    Where prompts differ in length their pass is neither compiled nor captured: with so many tokens launches are not the
    limit, it is a hundredth of the time, and torch would compile again for every new length, for minutes."""

    @torch.no_grad()
    def __init__(self, first: Next, following: Next, case: Case, device: torch.device, *, any_length: bool):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.prompts, self.tokens = zeros(case.batch, case.prompt), zeros(case.batch, max(1, case.new))
        self._token, self._position, self._count = zeros(case.batch, 1), zeros(1), zeros(1)
        self._places = torch.arange(case.prompt, device=device)  # kept here because a graph holds addresses

        def begin(prompts: Tensor) -> None:
            length = prompts.shape[1]
            self._token.copy_(first(prompts, self._places[:length]))
            self._position.fill_(length)
            self._count.zero_()
            self.tokens[:, :1] = self._token

        def begin_in_place() -> None:
            begin(self.prompts)

        def step() -> None:
            self._token.copy_(following(self._token, self._position))
            self._position.add_(1)
            self._count.add_(1)
            self.tokens.index_copy_(1, self._count, self._token)

        self._run = begin
        self._begin = None if any_length else self._captured(begin_in_place, begin_in_place)
        self._step = self._captured(step, begin_in_place) if case.new > 1 else None

    @staticmethod
    def _captured(work: Callable[[], None], before: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `work` after three runs on a side stream, as torch requires; the first of them compiles."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                before()
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        before()
        with torch.cuda.graph(graph):
            work()
        return graph

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int, mark: Mark) -> Tensor:
        """Copy the prompts in and replay one graph per token."""
        mark()
        if self._begin is None:
            self._run(prompts)
        else:
            self.prompts.copy_(prompts)
            self._begin.replay()
        for _ in range(1, new):
            assert self._step is not None
            mark()
            self._step.replay()
        return self.tokens[:, :new]


def _nothing() -> None:
    pass


class StaticKV(Method):
    """The static cache, run eagerly."""

    title = "static KV cache, eager"
    windows = True
    by_order = True  # its model is plain functions, without modules to hook
    fixed = True
    #: Whether CUDA graphs launch its kernels on a GPU.
    captured = False

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        slots = min(-(-(case.prompt + case.new) // 64) * 64, weights.config.n_positions)
        self.model = StaticModel(weights, case.batch, slots, case.window).requires_grad_(False).eval()
        self._first = self._next = self._likeliest
        any_length = case.kind == "throughput"
        if self.compiled:
            self._next = torch.compile(self._likeliest, fullgraph=True, dynamic=False)
            self._first = self._likeliest if any_length else self._next
        self._graphs: _Graphs | None = None
        if self.captured and device.type == "cuda":
            self._graphs = _Graphs(self._first, self._next, case, device, any_length=any_length)
        self._mark: Mark = _nothing

    def _likeliest(self, ids: Tensor, position: Tensor) -> Tensor:
        """Return the likeliest token [B, 1] after the ids."""
        logits: Tensor = self.model(ids, position)
        return logits.argmax(dim=-1, keepdim=True)

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Run the prompt in one pass, then one step per token, without waiting for the device in between."""
        if self._graphs is not None:
            return self._graphs.generate(prompts, new, self._mark)
        self._mark()
        token = self._first(prompts, torch.arange(prompts.shape[1], device=self.device))
        tokens = [token]
        position = torch.full((1,), prompts.shape[1], device=self.device)
        for _ in range(1, new):
            self._mark()
            token = self._next(token, position)
            tokens.append(token)
            position = position + 1
        return torch.cat(tokens, dim=1)

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Report the begin of every step, also where a graph is replayed."""
        self._mark = watcher.step
        try:
            yield
        finally:
            self._mark = _nothing

    def close(self) -> None:
        """Release the model, which holds the cache, and the compiled code, which holds the model."""
        super().close()
        del self.model, self._first, self._next, self._graphs


class StaticKVGraph(StaticKV):
    """The prompt's pass and each step captured once in a CUDA graph and replayed."""

    title = "static KV cache, CUDA graph"
    devices = ("cuda",)
    captured = True


class StaticKVCompiled(StaticKV):
    """Compiled by torch, and on a GPU also captured: the peer to beat."""

    title = "static KV cache, torch.compile"
    compiled = captured = True
    serves = "padded"
    warm_up = 1
    startup_seconds = COMPILE_SECONDS

    @classmethod
    def missing(cls) -> str | None:
        """Return what torch.compile lacks on a CPU: a C++ compiler. None if it is there."""
        if torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++"):
            return None
        return "torch.compile needs a C++ compiler here"


class StaticKVCompiledInt8(InInt8, StaticKVCompiled):
    """The compiled peer with int8 weights, which its code reads as codes and converts on the way."""

    title = "static KV cache, torch.compile, int8 weights"
