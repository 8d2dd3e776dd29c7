"""The executor that `auto` means on a GPU: one launch for many tokens where few sequences are decoded, a graph where
many are or where it was measured to be faster, and prompts as both do them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from warpline.engine import speeds
from warpline.engine.executor import Executor
from warpline.engine.graph_exec import GraphExecutor
from warpline.engine.persistent_exec import PersistentExecutor
from warpline.engine.state import State
from warpline.errors import ConfigError, WarplineError
from warpline.model.weights import Weights

logger = logging.getLogger(__name__)


class AutoExecutor(Executor):
    """Chooses for each batch, and says once what it has to choose from."""

    name = "auto"
    chunk = 32

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        super().__init__(weights, device, dtype)
        self._graph = GraphExecutor(weights, device, dtype)
        self._persistent: PersistentExecutor | None = None
        self._most, self._last = 0, ""  # sequences that the persistent one takes; who decoded last
        self._gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._told: set[int] = set()  # batches for which it was said who is faster
        try:
            self._persistent = PersistentExecutor(weights, device, dtype)
        except (WarplineError, torch.OutOfMemoryError) as reason:  # it keeps the weights a second time
            self._tell(reason)
        else:
            self._most = self._persistent.most_rows or 0
            logger.info("executor auto → persistent up to %s sequences, graph beyond", self._most)

    def _tell(self, reason: Exception) -> None:
        level = logging.INFO if isinstance(reason, ConfigError) else logging.WARNING
        text, beyond = str(reason).splitlines()[0], f" beyond {self._most} sequences" if self._most else ""
        logger.log(level, "executor auto → graph%s: %s", beyond, text)

    @property
    def described(self) -> str:
        """With the one that decoded last."""
        return f"{self.name} ({self._last})" if self._last else self.name

    def _prefers_graph(self, state: State) -> bool:
        """Whether it was measured to be faster."""
        us = speeds.compared(self._gpu, self.config, self.dtype, state.batch, state.longest)
        if not us or us["graph"] >= us["persistent"]:
            return False
        if state.batch not in self._told:
            self._told.add(state.batch)
            logger.info(
                "executor auto → graph for %s sequences: a step was measured at %.1f µs, persistent at %.1f",
                state.batch, us["graph"], us["persistent"],
            )  # fmt: skip
        return True

    def _for(self, state: State) -> GraphExecutor | PersistentExecutor:
        chosen: GraphExecutor | PersistentExecutor = self._graph
        if self._persistent is not None and state.batch <= self._most and not self._prefers_graph(state):
            try:
                self._persistent.prepare(state)
                chosen = self._persistent
            except (WarplineError, torch.OutOfMemoryError) as reason:  # too little shared memory for so many rows, say
                self._most = state.batch // 2
                self._tell(reason)
        self._last = chosen.name
        return chosen

    def _prefill(self, state: State) -> None:
        if self._persistent is not None and state.batch <= self._most and not self._prefers_graph(state):
            self._persistent.compile_ahead(state)
        self._graph._prefill(state)

    def _decode(self, state: State, n: int) -> None:
        self._for(state)._decode(state, n)

    def stops_by_itself(self, state: State) -> bool:
        """As whoever would decode."""
        return self._for(state).stops_by_itself(state)

    def check(self) -> None:
        """As the persistent executor does."""
        if self._persistent is not None:
            self._persistent.check()

    def observe(self, state: State) -> dict[str, Tensor]:
        """As whoever would decode."""
        return self._for(state).observe(state)
