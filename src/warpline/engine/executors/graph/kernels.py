"""The kernels executor: a decode step op by op, as the schedule lists them; the graph executor replays it as one graph.

Without a GPU the ops' references run instead: slow, from the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from warpline.config import WEIGHT_BYTES, EngineConfig
from warpline.engine.executors.base import Executor
from warpline.engine.executors.graph.bind import PREPARING, bind
from warpline.engine.executors.graph.prompts import Prompts
from warpline.engine.executors.graph.schedule import (
    End,
    OpCall,
    PassRules,
    buffers,
    decode_step,
    on_memory,
    order,
    shortened,
)
from warpline.engine.executors.sampling import note_logprobs
from warpline.engine.request import Span
from warpline.engine.slots import Slots
from warpline.kernels.catalog.products import MOST_MATVEC_ROWS
from warpline.model.weights import Weights

#: Context lengths that steps are bound for, with few lanes and with more, besides the whole capacity: the length
#: decides how attention is split and how large its blocks are.
POSITIONS_OF_FEW, POSITIONS_OF_MANY = (128, 256, 512), (128, 256)


def rounded_positions(lanes: int, longest: int, capacity: int) -> int:
    """Return the context length that a step of so many lanes is bound for; no sequence gets longer than `longest`."""
    choices = POSITIONS_OF_FEW if lanes <= MOST_MATVEC_ROWS else POSITIONS_OF_MANY
    return min(next((n for n in choices if n >= longest), capacity), capacity)


@dataclass(frozen=True, slots=True)
class BoundOp:
    """A decode step bound to memory."""

    run: Callable[[], object]
    logits: Tensor
    steps: list[OpCall]


class KernelsExecutor(Executor):
    """One launch per op."""

    name = "kernels"
    dtypes = tuple(WEIGHT_BYTES)
    prompt_tokens = 16384
    native = True
    can_be_invariant = can_quantise_kv = True
    _overlapping = False

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        super().__init__(weights, device, dtype)
        self.chunk, self.most_steps = (8, 64) if device.type == "cuda" else (1, 1)
        self.cached = weights.activations  # the dtype that the ops read
        self._rules = PassRules(weights)
        self.prompts = Prompts(self._rules)
        self._bound: WeakKeyDictionary[Slots, dict[tuple[int, End, int], BoundOp]] = WeakKeyDictionary()
        #: Buffers of steps by number of rows; steps run one after another, so they share them.
        self._memory: WeakKeyDictionary[Slots, dict[int, dict[str, Tensor]]] = WeakKeyDictionary()
        self._last: list[OpCall] | None = None

    def set_up(self, asked: EngineConfig, model: str) -> None:
        """Choose passes for a cache of codes, or with bits that do not depend on the batch, if asked for."""
        super().set_up(asked, model)
        if self.invariant or self.kv_dtype is not None:
            self._rules = replace(self._rules, invariant=self.invariant, kv_codes=self.kv_dtype is not None)
            self.prompts = Prompts(self._rules)

    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        self.prompts.run(slots, spans)

    @torch.inference_mode()
    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        needs, rows = slots.needs(lanes), self._rows(len(lanes))
        table = slots.crossing.select(lanes, rows)
        positions = rounded_positions(rows, max(slots.request(slot).limit for slot in lanes), slots.capacity)
        step = self._step(slots, table, self._rules.end(rows, likeliest=needs.likeliest), positions)
        self._last = step.steps
        for _ in range(n):
            self._reached("decode")
            if needs.logprobs is None:
                step.run()
            else:
                done = slots.done[table[: len(lanes)]]
                step.run()
                note_logprobs(slots, lanes, step.logits[: len(lanes)], done)

    @torch.inference_mode()
    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Decode a step in which every op has its own output, and return these."""
        named = buffers(self._rules, slots, slots.crossing.select(lanes, len(lanes)))
        self._prepare(decode_step(self._rules, len(lanes), End.DRAWN), named)()
        named["logits"] = named["logits"][:, : self.config.vocab_size]
        return {name: named[name].clone() for name in order(self.config.n_layer)}

    def table(self, phase: str) -> list[OpCall] | None:
        """Return the ops of the last pass."""
        return self.prompts.table if phase == "prefill" else self._last

    def _step(self, slots: Slots, table: Tensor, end: End, positions: int) -> BoundOp:
        steps, key = self._bound.setdefault(slots, {}), (len(table), end, positions)
        if (found := steps.get(key)) is None:
            with PREPARING:
                memory = self._memory.setdefault(slots, {})
                if len(table) not in memory:
                    memory[len(table)] = buffers(self._rules, slots, table)
                named = shortened(memory[len(table)], self.config.n_layer, positions)
                ops = decode_step(self._rules, len(table), end)
                found = steps[key] = BoundOp(self._prepare(ops, named), named["logits"], ops)
        return found

    def _rows(self, lanes: int) -> int:
        """Return the rows that a step computes for so many lanes: at least as many."""
        return lanes

    def _prepare(self, steps: list[OpCall], named: dict[str, Tensor]) -> Callable[[], object]:
        launches = bind(on_memory(steps, named), overlapping=self._overlapping, invariant=self._rules.invariant)

        def run() -> None:
            for launch in launches:
                launch()

        return run
