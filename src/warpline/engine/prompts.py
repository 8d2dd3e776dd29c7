"""Prompts: a library's products where they are many rows, our kernels for the rest, captured as graphs by length.

Per layer: QKV with its bias, FlashAttention that puts K and V into their slots, out-projection with its bias, residual
and LayerNorm in one, FC with bias and GELU, projection with its bias, residual and LayerNorm in one. Only the last
position of each sequence goes through the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpline.config import ACTIVATIONS
from warpline.engine.bind import Bound, bind, capture_stream
from warpline.engine.sampling import advance
from warpline.engine.schedule import ending
from warpline.engine.state import State
from warpline.errors import ConfigError
from warpline.kernels.catalog import find
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

    @torch.inference_mode()
    def run(self, state: State) -> None:
        """As `Executor._prefill` describes it."""
        passes: dict[tuple[int, int, str], Pass] = state.kept.setdefault(self, {})
        step = LENGTHS[-1] - LENGTHS[-2]
        length = next((n for n in LENGTHS if n >= state.longest), -(-state.longest // step) * step)
        key = (state.batch, min(length, state.capacity), state.needs.end)
        found = passes.pop(key, None)
        if found is None:
            while passes and sum(batch * length for batch, length, _ in (key, *passes)) > MOST_KEPT:
                del passes[next(iter(passes))]  # the one not used for longest
            found = Pass(self._weights, state, *key)
        passes[key] = found  # the last again
        found.run()
        if state.needs.end == "logits":
            advance(state, found.logits)


class Pass:
    """A pass over `batch` prompts of up to `length` tokens, bound to memory; it ends as `schedule.decode_step` does."""

    def __init__(self, weights: Weights, state: State, batch: int, length: int, end: str):
        self.weights, self.batch, self.length = weights, batch, length
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
        last = room(batch, config.n_embd)
        picked = [self.projected.view(batch, length, -1), self.middle.view(batch, length, -1), state.length[:batch]]
        #: The table of this pass, for whoever wants to know what its kernels are.
        self.bound = [
            *self._body(state),
            Bound(find("last_residual"), picked, [last], {}),
            *ending(weights, state, end, last, self.logits),
        ]
        self._steps = bind(self.bound, overlapping=True)
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

    def _body(self, state: State) -> list[Bound]:
        config, t, batch, length = self.weights.config, self.weights.tensors, self.batch, self.length
        by_head = self.qkv.view(batch, length, 3, config.n_head, config.head_size)
        q, k, v = (part.transpose(1, 2) for part in by_head.unbind(2))  # [B, H, T, D]
        embedded = [state.tokens[:batch], t["wte.weight"], t["wpe.weight"][:length]]
        steps = [
            Bound(find("prompt_embedding"), embedded, [self.x.view(batch, length, -1)], {}),
            Bound(find("layernorm"), [self.x, *self._affine("h.0.ln_1")], [self.normal], self._epsilon),
        ]
        for layer in range(config.n_layer):
            h = f"h.{layer}"
            numbers = {"window": config.window or 0, "scale": config.attention_scale(layer)}
            cache = [c[layer, :batch] for c in (state.cache.k, state.cache.v)]
            steps += [
                self._product(f"{h}.attn.c_attn", self.normal, self.qkv),
                Bound(find("prompt_attention"), [q, k, v, state.length[:batch], *cache], [self.heads], numbers),
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
