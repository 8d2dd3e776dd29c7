"""The graph executor: the kernels executor's step, captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warpline.engine.executors.graph.bind import captured
from warpline.engine.executors.graph.kernels import KernelsExecutor, rounded_positions
from warpline.engine.executors.graph.schedule import OpCall
from warpline.engine.slots import Slots
from warpline.errors import DeviceError
from warpline.model.weights import Weights

#: Numbers of lanes that steps are captured for; other numbers are rounded up, beyond the last to a multiple of it.
LANES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


class GraphExecutor(KernelsExecutor):
    """One graph launch per token."""

    name = "graph"
    _overlapping = True

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        if device.type != "cuda":
            raise DeviceError("the graph executor runs on a CUDA GPU: use --executor cpu here")
        super().__init__(weights, device, dtype)
        self.chunk, self.most_steps = 32, 128

    def _rows(self, lanes: int) -> int:
        return next((n for n in LANES if n >= lanes), -(-lanes // LANES[-1]) * LANES[-1])

    @torch.inference_mode()
    def prepare_all(self, slots: Slots, *, beyond: int = 0) -> None:
        """Capture steps of more than `beyond` lanes, for contexts of every length; and passes over prompts."""
        sizes = sorted({self._rows(lanes) for lanes in range(beyond + 1, slots.count + 1)})
        for rows in sizes:
            table = slots.crossing.select([], rows)
            for positions in sorted({rounded_positions(rows, n, slots.capacity) for n in range(1, slots.capacity + 1)}):
                for end in {self._rules.end(rows, likeliest=likeliest) for likeliest in (False, True)}:
                    self._step(slots, table, end, positions)
        self.prompts.prepare_all(slots)

    def _prepare(self, steps: list[OpCall], named: dict[str, Tensor]) -> Callable[[], object]:
        """Capture a step without a trial run, which would change the slots. Requires: all kernels are loaded."""
        launches = super()._prepare(steps, named)
        graph = captured([launches], self.device)

        def replay(_kept: Callable[[], object] = launches) -> None:  # keeps the memory of the graph alive
            graph.replay()

        return replay
