"""Prompts: a library's products where they are many rows, our kernels for the rest, captured as graphs by length.

A pass is the blocks of `schedule`, with FlashAttention that puts K and V into their slots. Behind the last attention
only the last position of each sequence goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from warpline.config import ACTIVATIONS
from warpline.engine.bind import bind, captured
from warpline.engine.sampling import advance
from warpline.engine.schedule import (
    Step,
    block_parameters,
    blocks,
    companions,
    ending,
    head_parameters,
    on_memory,
    room_for_logits,
    rows_of,
)
from warpline.engine.state import State
from warpline.errors import ConfigError
from warpline.model.weights import Weights

Launch = Callable[[], object]

#: Prompts are run as if they were as long as the next of these.
LENGTHS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
#: Tokens, of all passes together, whose memory is kept for the next time: some 20 KB each for gpt2.
MOST_KEPT = 1 << 16
#: Launches in a pass's first graph, the restart among them, and how much larger each graph is than the one before. A
#: graph whose kernels overlap begins when the host has gone through all of them, 1 µs each (H200); meanwhile the graph
#: before it runs, 4 each.
FIRST_PART, GROWTH = 8, 4


class Prompts:
    """The passes over prompts that a state has seen, for every executor of ours."""

    def __init__(self, weights: Weights):
        activation = weights.config.activation_function
        if ACTIVATIONS[activation] != "gelu_tanh":
            raise ConfigError(f"our kernels know only GELU's tanh form, not {activation}: use --executor torch")
        self._weights = weights

    def run(self, state: State) -> None:
        """As `Executor._prefill` describes it."""
        passes: dict[tuple[int, int, str], Pass] = state.kept.setdefault(self, {})
        at, step = bisect_left(LENGTHS, state.longest), LENGTHS[-1] - LENGTHS[-2]
        length = LENGTHS[at] if at < len(LENGTHS) else -(-state.longest // step) * step
        key = (state.batch, min(length, state.capacity), state.needs.end)
        found = passes.pop(key, None)
        if found is None:
            while passes and sum(batch * length for batch, length, _ in (key, *passes)) > MOST_KEPT:
                del passes[next(iter(passes))]  # the one not used for longest
            found = Pass(self._weights, state, *key)
        passes[key] = found  # the last again
        found.run()
        if state.needs.end == "logits":
            with torch.inference_mode():
                advance(state, found.logits)


def growing(launches: Sequence[Launch]) -> list[Sequence[Launch]]:
    """The launches in parts, each some times as long as the one before."""
    parts, size = [], FIRST_PART
    while len(launches) > 2 * size:
        parts.append(launches[:size])
        launches, size = launches[size:], size * GROWTH
    return [*parts, launches]


class Pass:
    """A pass over `batch` prompts of up to `length` tokens, bound to memory; it ends as `schedule.decode_step` does."""

    @torch.inference_mode()
    def __init__(self, weights: Weights, state: State, batch: int, length: int, end: str):
        config, some = weights.config, weights.tensors["wte.weight"]
        self._device = some.device
        self.logits = room_for_logits(weights, batch)
        named = _memory(weights, state, batch, length) | _last_memory(weights, state, batch) | {"logits": self.logits}

        def attention(layer: int) -> Step:
            h = f"h.{layer}"
            inputs = (*(f"{h}.{name}" for name in "qkv"), "length", f"{h}.cache_k", f"{h}.cache_v")
            numbers = {"window": config.window or 0, "scale": config.attention_scale(layer)}
            return Step("prompt_attention", inputs, (f"{h}.heads",), numbers, layer)

        steps = [
            Step("prompt_embedding", ("tokens", "wte.weight", "places"), ("all.in",)),
            *blocks(weights, batch * length, attention, last_rows=batch),
            *ending(weights, batch, end, "last.out"),
        ]
        #: The table of this pass, for whoever wants to know what its kernels are.
        self.bound = on_memory(steps, named)
        self._launches: list[Launch] = [state.restart, *bind(self.bound, overlapping=True)]
        self._runs = 0
        self._replays: list[Launch] = []

    def run(self) -> None:
        """Kernel by kernel the first time, captured the second: a length that does not come again should not wait for a
        capture. A replay needs nothing but to be launched: the GPU waits for the first."""
        if not self._replays:
            self._begin()
        for replay in self._replays:
            replay()

    @torch.inference_mode()
    def _begin(self) -> None:
        self._runs += 1
        if self._runs == 2 and self._device.type == "cuda":
            self._replays = [captured(part, self._device).replay for part in growing(self._launches)]
            return
        for launch in self._launches:
            launch()


def _memory(weights: Weights, state: State, batch: int, length: int) -> dict[str, Tensor]:
    """Memory for every name that a pass mentions; all layers share what lies between."""
    config, some = weights.config, weights.tensors["wte.weight"]
    rows = batch * length

    def room(columns: int) -> Tensor:
        return some.new_empty(rows, columns)

    x, middle = (room(config.n_embd) for _ in range(2))
    qkv, hidden, attention = room(3 * config.n_embd), room(config.inner), room(config.n_embd)
    by_head = qkv.view(batch, length, 3, config.n_head, config.head_size)
    q, k, v = (part.transpose(1, 2) for part in by_head.unbind(2))  # [B, H, T, D]
    heads = attention.view(batch, length, config.n_head, config.head_size)
    found = {**block_parameters(weights, rows), "places": weights.tensors["wpe.weight"][:length]}
    found |= {"tokens": state.tokens[:batch], "length": state.length[:batch]}
    found |= {f"all.{name}": tensor.view(batch, length, -1) for name, tensor in (("in", x), ("attention", attention))}
    beside = companions(weights, {"in": x, "middle": middle})
    for layer in range(config.n_layer):
        own = {"in": x, "middle": middle, "qkv": qkv, "q": q, "k": k, "v": v, "heads": heads, "attention": attention}
        own |= {"hidden": hidden, **beside}
        own |= {"cache_k": state.cache.k[layer, :batch], "cache_v": state.cache.v[layer, :batch]}
        found |= {f"h.{layer}.{name}": tensor for name, tensor in own.items()}
    return found


def _last_memory(weights: Weights, state: State, batch: int) -> dict[str, Tensor]:
    """Memory for every name from the last block's attention on, where one row of each sequence is left."""
    config, some = weights.config, weights.tensors["wte.weight"]
    names = ("attention", "in", "middle", "out", "out.normal")
    rows = {f"last.{name}": some.new_empty(batch, config.n_embd) for name in names}
    found = {**block_parameters(weights, batch), **head_parameters(weights, batch), **rows_of(state, batch)}
    beside = companions(weights, {name: rows[name] for name in ("last.middle", "last.out")})
    return found | rows | beside | {"last.hidden": some.new_empty(batch, config.inner)}
