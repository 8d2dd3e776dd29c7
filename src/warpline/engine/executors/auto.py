"""The executor that `auto` means on a GPU: the persistent kernel for few sequences, CUDA graphs for more, and the same
passes over prompts for both."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from warpline.config import WEIGHT_BYTES, EngineConfig
from warpline.engine.executors.base import Executor, Mark
from warpline.engine.executors.graph.executor import GraphExecutor
from warpline.engine.executors.graph.schedule import OpCall
from warpline.engine.executors.persistent.executor import PersistentExecutor
from warpline.engine.request import Needs, Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError, DeviceError, WarplineError
from warpline.kernels.decode_plan import MOST_ROWS
from warpline.model.weights import Weights

logger = logging.getLogger(__name__)


class AutoExecutor(Executor):
    """Chooses an executor by the number of lanes, and logs once which it has."""

    name = "auto"
    dtypes = tuple(WEIGHT_BYTES)
    chunk, most_steps = 32, 128
    prompt_tokens = 16384
    native = True
    can_be_invariant = can_quantise_kv = True

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        super().__init__(weights, device, dtype)
        self._weights = weights
        self._graph = GraphExecutor(weights, device, dtype)
        self._persistent: PersistentExecutor | None = None
        self._most, self._last = 0, ""  # most lanes of the persistent executor; name of the executor that decoded last

    def set_up(self, asked: EngineConfig, model: str) -> None:
        """Set up both executors. They add in different orders, so where bits must not depend on the batch only one
        decodes: the persistent one if it can decode as many sequences as may ever run at once."""
        super().set_up(asked, model)
        self._graph.set_up(asked, model)
        if self.kv_dtype is not None:
            self._tell(ConfigError(f"the persistent executor has no kv_dtype={self.kv_dtype!r}"))
            return
        if self.invariant and (asked.max_batch or MOST_ROWS + 1) > MOST_ROWS:
            self._tell(ConfigError(f"deterministic='batch', and max_batch may exceed {MOST_ROWS}"))
            return
        try:
            made = PersistentExecutor(self._weights, self.device, self.dtype, prompts=self._graph.prompts)
        except (WarplineError, torch.OutOfMemoryError) as reason:  # it keeps a second copy of the weights
            self._tell(reason)
            return
        made.set_up(asked, model)
        most = made.most_lanes or 0
        if self.invariant and most < (asked.max_batch or 0):
            self._tell(ConfigError(f"deterministic='batch', and max_batch exceeds {most}"))
            return
        self._persistent, self._most, self.has_tape = made, most, True
        beyond = "" if self.invariant else ", graph beyond"
        logger.info("executor auto → persistent up to %s sequences%s", most, beyond)

    def _tell(self, reason: Exception) -> None:
        level = logging.INFO if isinstance(reason, ConfigError) else logging.WARNING
        text, beyond = str(reason).splitlines()[0], f" beyond {self._most} sequences" if self._most else ""
        logger.log(level, "executor auto → graph%s: %s", beyond, text)

    @property
    def described(self) -> str:
        """Its name, with that of the executor that decoded last."""
        return f"{self.name} ({self._last})" if self._last else self.name

    def _for(self, slots: Slots, lanes: Sequence[int]) -> GraphExecutor | PersistentExecutor:
        chosen: GraphExecutor | PersistentExecutor = self._graph
        if self._persistent is not None and len(lanes) <= self._most:
            try:
                self._persistent.prepare(slots, lanes)
                chosen = self._persistent
            except (WarplineError, torch.OutOfMemoryError) as reason:  # too little shared memory for so many rows, say
                if self.invariant:
                    raise
                self._most = len(lanes) // 2
                self._tell(reason)
        self._last = chosen.name
        return chosen

    def compile_ahead(self, slots: Slots, lanes: Sequence[int]) -> None:
        """Start compiling if the persistent kernel would decode these lanes."""
        if self._persistent is not None and len(lanes) <= self._most:
            self._persistent.compile_ahead(slots, lanes)

    def prepare_all(self, slots: Slots) -> None:
        """Prepare both executors, each for the numbers of lanes that it would decode."""
        if self._persistent is not None:
            self._persistent.prepare_all(slots)
        self._graph.prepare_all(slots, beyond=self._most)

    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        self._graph._prefill(slots, spans)

    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        self._for(slots, lanes)._decode(slots, lanes, n)

    def stops_by_itself(self, lanes: int, needs: Needs) -> bool:
        """Return what the executor that would decode says."""
        return self._persistent is not None and lanes <= self._most and self._persistent.stops_by_itself(lanes, needs)

    def screens(self, slots: Slots, lanes: Sequence[int]) -> bool:
        """Return what the executor that would decode says."""
        return self._persistent is not None and len(lanes) <= self._most and self._persistent.screens(slots, lanes)

    def fault(self) -> DeviceError:
        """Return the persistent executor's error; only its launches wait and can end themselves."""
        return super().fault() if self._persistent is None else self._persistent.fault()

    def table(self, phase: str) -> list[OpCall] | None:
        """Return the graph executor's table; both executors share its passes over prompts."""
        return self._graph.table(phase)

    @contextmanager
    def trace(self, mark: Mark) -> Iterator[None]:
        """Call `mark` before each step of either executor."""
        other = nullcontext() if self._persistent is None else self._persistent.trace(mark)
        with super().trace(mark), self._graph.trace(mark), other:
            yield

    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Let the executor that would decode observe a step."""
        return self._for(slots, lanes).observe(slots, lanes)
