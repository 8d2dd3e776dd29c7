"""The graph executor: the kernels executor's step, captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warpline.engine.bind import captured
from warpline.engine.kernels_exec import KernelsExecutor
from warpline.engine.schedule import Step
from warpline.engine.state import State
from warpline.errors import DeviceError
from warpline.model.weights import Weights

#: Batches larger than the last of these go by multiples of it; a batch between two runs as the larger.
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


class GraphExecutor(KernelsExecutor):
    """One graph launch per token."""

    name = "graph"
    _overlapping = True

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        if device.type != "cuda":
            raise DeviceError("the graph executor runs on a CUDA GPU: use --executor torch here")
        super().__init__(weights, device, dtype)
        self.chunk = 32

    def _rows(self, state: State) -> int:
        bucket = next((n for n in BATCHES if n >= state.batch), -(-state.batch // BATCHES[-1]) * BATCHES[-1])
        return min(bucket, state.rows)

    def _prepare(self, steps: list[Step], named: dict[str, Tensor]) -> Callable[[], None]:
        """Captured without a trial, which would change the state; all kernels are loaded by then."""
        launches = super()._prepare(steps, named)
        graph = captured([launches], self.device)

        def replay(_kept: Callable[[], None] = launches) -> None:  # its memory is the graph's
            graph.replay()

        return replay
