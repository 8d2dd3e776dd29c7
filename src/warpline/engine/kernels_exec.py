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
        self._made: dict[tuple[int, str], Callable[[], None]] = {}
        self._logits: dict[int, Tensor] = {}
        self._of: State | None = None

    def _prefill(self, state: State) -> None:
        self._prompts.run(state)

    @torch.inference_mode()
    def _decode(self, state: State, n: int) -> None:
        if self._of is not state:  # what was made points into another state
            self._made.clear()
            self._logits.clear()
            self._of = state
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
        return {name: named[name].clone() for name in order(self.config.n_layer)}

    def _step(self, state: State) -> None:
        needs, rows = state.needs, self._rows(state)
        end = "drawn" if needs.penalty or needs.random or needs.min_length else "likeliest"
        if needs.logprobs is not None:
            end = "logits"
        if (rows, end) not in self._made:
            named = buffers(self._weights, state, rows)
            self._logits[rows] = named["logits"]
            self._made[rows, end] = self._prepare(decode_step(self._weights, rows, end), named)
        self._made[rows, end]()
        if end == "logits":
            advance(state, self._logits[rows][: state.batch])

    def _rows(self, state: State) -> int:
        """How many rows of the state a step computes: those in use, at least."""
        return state.batch

    def _prepare(self, steps: list[Step], named: dict[str, Tensor]) -> Callable[[], None]:
        launches = bind(on_memory(steps, named), overlapping=self._overlapping)

        def run() -> None:
            for launch in launches:
                launch()

        return run
