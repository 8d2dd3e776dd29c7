"""Prompts: a library's products where they are many rows, our kernels for the rest, captured as graphs by length.

Per layer: QKV with its bias, K and V into their slots, FlashAttention, out-projection with its bias, residual and
LayerNorm in one, FC with bias and GELU, projection with its bias, residual and LayerNorm in one. Only the last position
of each sequence goes through the head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warpline.config import ACTIVATIONS
from warpline.engine.bind import Bound, bind, capture_stream
from warpline.engine.sampling import advance
from warpline.engine.schedule import drawing
from warpline.engine.state import State
from warpline.errors import ConfigError
from warpline.kernels.catalog import find
from warpline.kernels.catalog.products import MOST_MATVEC_ROWS
from warpline.model.weights import Weights

#: Prompts are run as if they were as long as the next of these.
LENGTHS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
#: Tokens, of all passes together, whose memory is kept for the next time: some 20 KB each for gpt2.
MOST_KEPT = 1 << 16


class Prompts:
    """The passes over prompts that a state has seen, for every executor of ours."""

    def __init__(self, weights: Weights):
        activation = weights.config.activation_function
        if ACTIVATIONS[activation] != "gelu_tanh":
            raise ConfigError(f"our kernels know only GELU's tanh form, not {activation}: use --executor torch")
        self._weights = weights
        self._passes: dict[tuple[int, int, bool], Pass] = {}
        self._of: State | None = None

    @torch.inference_mode()
    def run(self, state: State) -> None:
        """As `Executor._prefill` describes it."""
        if self._of is not state:  # what was made points into another state
            self._passes.clear()
            self._of = state
        draws = state.needs.logprobs is None
        step = LENGTHS[-1] - LENGTHS[-2]
        length = next((n for n in LENGTHS if n >= state.longest), -(-state.longest // step) * step)
        key = (state.batch, min(length, state.capacity), draws)
        found = self._passes.pop(key, None)
        if found is None:
            while self._passes and sum(batch * length for batch, length, _ in (key, *self._passes)) > MOST_KEPT:
                del self._passes[next(iter(self._passes))]  # the one not used for longest
            found = Pass(self._weights, state, *key[:2], draws=draws)
        self._passes[key] = found  # the last again
        found.run()
        if not draws:
            advance(state, found.logits)


class Pass:
    """A pass over `batch` prompts of up to `length` tokens, bound to memory; with `draws` a token is appended to each,
    otherwise it ends with `logits`."""

    def __init__(self, weights: Weights, state: State, batch: int, length: int, *, draws: bool):
        self.weights, self.state, self.batch, self.length = weights, state, batch, length
        config, some = weights.config, weights.tensors["wte.weight"]
        rows = batch * length

        def room(*shape: int) -> Tensor:
            return some.new_empty(shape)

        self.x, self.middle = room(rows, config.n_embd), room(rows, config.n_embd)
        self.normal, self.projected = room(rows, config.n_embd), room(rows, config.n_embd)
        self.qkv = room(rows, 3 * config.n_embd)
        self.hidden = room(rows, config.inner)
        self.heads = room(batch, length, config.n_head, config.head_size)
        self.logits = room(batch, config.vocab_size)
        steps = [*self._body(), *self._end()]
        if draws:
            steps += drawing(state, self.logits)
        self._steps = bind(steps, overlapping=True)
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Kernel by kernel the first time, captured the second: a length that does not come again should not wait for a
        capture."""
        self._runs += 1
        if self._graph is None and self._runs == 2 and self.x.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=capture_stream(self.x.device)):
                self._enqueue()
            self._graph = graph
        if self._graph is not None:
            self._graph.replay()
        else:
            self._enqueue()

    def _enqueue(self) -> None:
        for step in self._steps:
            step()

    def _body(self) -> list[Bound | Callable[[], None]]:
        config, t, state = self.weights.config, self.weights.tensors, self.state
        batch, length = self.batch, self.length
        ids = torch.empty(batch, length, dtype=torch.long, device=self.x.device)
        positions = torch.arange(length, device=self.x.device).repeat(batch)
        by_head = self.qkv.view(batch, length, 3, config.n_head, config.head_size)
        q, new_k, new_v = (part.transpose(1, 2) for part in by_head.unbind(2))  # [B, H, T, D]

        def look_up() -> None:
            ids.copy_(state.tokens[:batch, :length])

        embedded = [ids.view(-1), positions, t["wte.weight"], t["wpe.weight"]]
        steps: list[Bound | Callable[[], None]] = [
            look_up,
            Bound(find("embedding"), embedded, [self.x], {}),
            Bound(find("layernorm"), [self.x, *self._affine("h.0.ln_1")], [self.normal], self._epsilon),
        ]
        for layer in range(config.n_layer):
            h = f"h.{layer}"
            numbers = {"window": config.window or 0, "scale": config.attention_scale(layer)}
            k, v = (c[layer, :batch, :, :length] for c in (state.cache.k, state.cache.v))
            steps += [
                self._product(f"{h}.attn.c_attn", self.normal, self.qkv),
                Bound(find("fill_cache"), [new_k, new_v, k, v], [], {}),
                Bound(find("flash_attention"), [q, k, v, state.length[:batch]], [self.heads], numbers),
                self._product(f"{h}.attn.c_proj", self.heads.view(-1, config.n_embd), self.projected),
                self._residual(self.x, f"{h}.ln_2", self.middle),
                self._product(f"{h}.mlp.c_fc", self.normal, self.hidden, "matmul_bias_gelu"),
                self._product(f"{h}.mlp.c_proj", self.hidden, self.projected),
            ]
            if layer + 1 < config.n_layer:
                steps.append(self._residual(self.middle, f"h.{layer + 1}.ln_1", self.x))
        return steps

    @property
    def _epsilon(self) -> dict[str, float]:
        return {"epsilon": self.weights.config.layer_norm_epsilon}

    def _affine(self, name: str) -> list[Tensor]:
        return [self.weights.tensors[f"{name}.weight"], self.weights.tensors[f"{name}.bias"]]

    def _residual(self, residual: Tensor, norm: str, total: Tensor) -> Bound:
        """What was projected plus the residual, and LayerNorm of the sum."""
        inputs = [self.projected, residual, *self._affine(norm)]
        return Bound(find("residual_layernorm"), inputs, [total, self.normal], self._epsilon)

    def _product(self, name: str, source: Tensor, target: Tensor, op: str = "matmul_bias") -> Bound:
        return Bound(find(op), [source, *self._affine(name)], [target], {})

    def _end(self) -> list[Bound | Callable[[], None]]:
        """The last position of each prompt: residual, LayerNorm, head."""
        batch, t = self.batch, self.weights.tensors
        start = torch.arange(batch, device=self.x.device) * self.length - 1
        last = torch.empty_like(start)
        projected, residual, total, normal = (self.x.new_empty(batch, self.x.shape[1]) for _ in range(4))
        head = t.get("lm_head.weight", t["wte.weight"])

        def pick() -> None:
            torch.add(start, self.state.length[:batch], out=last)
            torch.index_select(self.projected, 0, last, out=projected)
            torch.index_select(self.middle, 0, last, out=residual)

        inputs = [projected, residual, *self._affine("ln_f")]
        multiply = Bound(find("matvec" if batch <= MOST_MATVEC_ROWS else "matmul"), [normal, head], [self.logits], {})
        return [pick, Bound(find("residual_layernorm"), inputs, [total, normal], self._epsilon), multiply]
