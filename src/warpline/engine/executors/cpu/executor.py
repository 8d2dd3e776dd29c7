"""The cpu executor: tokens decoded by a team of threads in one call, prompts through the BLAS that torch brings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from warpline import hardware
from warpline.config import ACTIVATIONS, KV_DTYPES, WEIGHT_BYTES, ModelConfig
from warpline.engine.executors.base import Executor
from warpline.engine.executors.cpu.call import BEHIND_ATTENTION, BEHIND_KEYS, HEAD, Call
from warpline.engine.executors.cpu.prompts import CpuPrompts
from warpline.engine.executors.sampling import advance
from warpline.engine.request import Needs, Span
from warpline.engine.slots import Slots
from warpline.errors import DeviceError
from warpline.kernels.cpu import library
from warpline.model.screen import Screen
from warpline.model.weights import Weights

#: Tokens of prompts up to which a matrix that would have to be converted is rather multiplied as it is.
FEW = 32


class Team:
    """Threads that run the same function at the same time, each with its number; the caller is number 0."""

    def __init__(self, size: int):
        self.size = size
        self._work: list[SimpleQueue[Callable[[int], Any] | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        for number, work in enumerate(self._work, 1):
            threading.Thread(target=self._serve, args=(number, work), daemon=True).start()

    def _serve(self, number: int, work: SimpleQueue[Callable[[int], Any] | None]) -> None:
        while (task := work.get()) is not None:
            try:
                task(number)
                self._ended.put(None)
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._ended.put(error)

    def run(self, task: Callable[[int], Any]) -> Any:
        """What number 0 returns, when all have ended."""
        for work in self._work:
            work.put(task)
        result = task(0)
        for error in [self._ended.get() for _ in self._work]:
            if error is not None:
                raise error
        return result

    def close(self) -> None:
        """Let the threads go."""
        for work in self._work:
            work.put(None)


class CpuExecutor(Executor):
    """One call for many tokens."""

    name = "cpu"
    dtypes = tuple(WEIGHT_BYTES)

    def __init__(
        self, weights: Weights, device: torch.device, dtype: str, *, threads: int | None = None, screened: bool = True
    ):
        if device.type != "cpu":
            raise DeviceError("the cpu executor runs on a CPU: use --device cpu, or another executor here")
        super().__init__(weights, device, dtype)
        self.chunk, self.most_steps, self.crowd = 16, 32, 4  # what the host does, the team has to wait for
        self.threads = threads or hardware.threads()
        self._program = _program(weights.config, dtype)
        self._team = Team(self.threads)
        weakref.finalize(self, self._team.close).atexit = False  # a thread must not wake while Python ends
        self._alone = threading.Lock()
        self._prompts = CpuPrompts(weights)
        self._head = weights.head
        self._tensors = {
            name: value.float().contiguous() if value.dim() == 1 or name == "wpe.weight" else value
            for name, value in weights.tensors.items()
        }
        # Codes of the LM head; int8 weights are codes already.
        self._screen = Screen.of(weights.tensors[f"{weights.head}.weight"]) if screened and dtype != "int8" else None
        self._calls: weakref.WeakKeyDictionary[Slots, Call] = weakref.WeakKeyDictionary()

    @classmethod
    def begin(cls, config: ModelConfig, dtype: str) -> None:
        """Compile, on another core."""
        _program(config, dtype)

    def ready(self) -> None:
        """Wait for the compiler."""
        self._program.function()

    @torch.inference_mode()
    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        """Layers through BLAS, or through the compiled stages where tokens are few; then the head and the choice as in
        a decode step, unless that is still being compiled."""
        counts, ends = [span.end - span.start for span in spans], [span for span in spans if span.lanes]
        lanes = [lane for span in ends for lane in span.lanes]
        source = [i for i, span in enumerate(ends) for _ in span.lanes]  # the end that each lane follows from
        # A token of each slot is a decode step. So are more where BLAS would have to convert the weights.
        few = max(len(spans), 0 if self.dtype == "fp32" else FEW)
        is_ready, call = self._program.is_ready, self._call(slots)
        if is_ready and sum(counts) <= few:
            places = [(span.slot, position) for span in spans for position in range(span.start, span.end)]
            self._run(lambda: call.given(*zip(*places, strict=True), end=BEHIND_ATTENTION if ends else BEHIND_KEYS))
            if ends:
                last = np.cumsum(counts)[[i for i, span in enumerate(spans) if span.lanes]] - 1
                rows = torch.from_numpy(last[source])
                call.x[: len(lanes)], call.attended[: len(lanes)] = call.x[rows], call.attended[rows]
                self._finish(slots, lanes, BEHIND_ATTENTION)
            return
        with self._alone:  # all conversions share one room
            x = self._prompts.run(slots, spans)
        if is_ready and ends:
            call.x[: len(lanes)] = x[source]
            self._finish(slots, lanes, HEAD)
        elif ends:
            with self._alone:
                logits = self._prompts.logits(x)
            advance(slots, lanes, logits[source])

    def _finish(self, slots: Slots, lanes: Sequence[int], first: int) -> None:
        """The step from stage `first` on, for what stands in the memory between stages."""
        call, chooses, screens = self._call(slots), slots.needs(lanes).logprobs is None, self.screens(slots, lanes)
        self._run(lambda: call.ready(lanes, first=first, chooses=chooses, screens=screens))
        if not chooses:
            advance(slots, lanes, call.logits[: len(lanes)])

    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        """In one call, unless the logarithms of probabilities are asked for or every step is watched."""
        chooses = slots.needs(lanes).logprobs is None
        at_once = n if chooses and self._mark is None else 1
        call = self._call(slots)
        for _ in range(0, n, max(at_once, 1)):
            self._reached("decode")
            self._steps(slots, lanes, at_once, chooses=chooses)
            if call.halts:
                break

    def halt(self, slots: Slots, wanted: bool) -> None:
        """The team asks behind every step."""
        if (call := self._calls.get(slots)) is not None:
            call.halts = wanted

    def stops_by_itself(self, lanes: int, needs: Needs) -> bool:
        """The team looks before every step."""
        return needs.logprobs is None

    def screens(self, slots: Slots, lanes: Sequence[int]) -> bool:
        """Where nothing but the largest logit is asked for. Several rows in half precision would be no faster."""
        needs = slots.needs(lanes)
        asked = needs.logprobs is not None or needs.filters
        return self._screen is not None and not asked and (self.dtype == "fp32" or len(lanes) == 1)

    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """The logits; nothing else of a step is left afterwards."""
        self._steps(slots, lanes, 1, chooses=False)
        return {"logits": self._call(slots).logits[: len(lanes)].clone()}

    def _steps(self, slots: Slots, lanes: Sequence[int], n: int, *, chooses: bool) -> None:
        """`n` steps; one, where torch chooses."""
        call = self._call(slots)
        screens = chooses and self.screens(slots, lanes)
        self._run(lambda: call.newest(lanes, n, chooses=chooses, screens=screens))
        if not chooses:
            with torch.inference_mode():
                advance(slots, lanes, call.logits[: len(lanes)])

    def _run(self, told: Callable[[], int]) -> None:
        """Have the team do what it is told, at the address that `told` gives: it meets for one thing at a time."""
        with self._alone:
            address, function = told(), self._program.function()
            self._team.run(lambda me: function(me, address))

    def _call(self, slots: Slots) -> Call:
        if (call := self._calls.get(slots)) is None:
            rows = max(slots.count, FEW)
            call = Call(
                self.config, self._tensors, self._head, slots, screen=self._screen, rows=rows, threads=self.threads
            )
            self._calls[slots] = call
        return call


def _program(config: ModelConfig, dtype: str) -> library.Build:
    return library.build(dtype, KV_DTYPES[dtype], ACTIVATIONS[config.activation_function])
