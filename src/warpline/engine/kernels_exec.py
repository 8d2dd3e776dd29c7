"""The kernels executor: a decode step op by op, as the schedule has it; the graph executor replays it as one graph.

Without a GPU the ops' references run in their place: slow, and the same table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warpline.engine.bind import bind
from warpline.engine.executor import Executor
from warpline.engine.prompts import Prompts
from warpline.engine.sampling import advance
from warpline.engine.schedule import Step, buffers, decode_step, on_memory, order
from warpline.engine.state import State
from warpline.model.weights import Weights


class KernelsExecutor(Executor):
    """One launch per op."""

    name = "kernels"
    _overlapping = False

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        super().__init__(weights, device, dtype)
        self.chunk = 8 if device.type == "cuda" else 1
        self._weights = weights
        self._prompts = Prompts(weights)

    def _prefill(self, state: State) -> None:
        self._prompts.run(state)

    @torch.inference_mode()
    def _decode(self, state: State, n: int) -> None:
        for _ in range(n):
            self._step(state)

    @torch.inference_mode()
    def observe(self, state: State) -> dict[str, Tensor]:
        """Every op has its own output, so all of them are still there."""
        batch = state.batch
        named = buffers(self._weights, state, batch)
        self._prepare(decode_step(self._weights, batch, "logits"), named)()
        advance(state, named["logits"])
        state.longest = min(state.longest + 1, state.capacity)
        named["logits"] = named["logits"][:, : self.config.vocab_size]
        return {name: named[name].clone() for name in order(self.config.n_layer)}

    def _step(self, state: State) -> None:
        end, rows = state.needs.end, self._rows(state)
        if (key := (self, rows, end)) not in state.kept:
            named = buffers(self._weights, state, rows)
            state.kept[key] = self._prepare(decode_step(self._weights, rows, end), named), named["logits"]
        run, logits = state.kept[key]
        run()
        if end == "logits":
            advance(state, logits[: state.batch])

    def _rows(self, state: State) -> int:
        """How many rows of the state a step computes: those in use, at least."""
        return state.batch

    def _prepare(self, steps: list[Step], named: dict[str, Tensor]) -> Callable[[], None]:
        launches = bind(on_memory(steps, named), overlapping=self._overlapping)

        def run() -> None:
            for launch in launches:
                launch()

        return run
