"""The cpu executor: a team of threads runs one compiled function, for prompts and for many tokens in one call."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from warpline import hardware
from warpline.config import ACTIVATIONS, KV_DTYPES, WEIGHT_BYTES, EngineConfig, ModelConfig
from warpline.engine.clock import Drafted
from warpline.engine.executors.base import Executor
from warpline.engine.executors.cpu.call import BEHIND_ATTENTION, BEHIND_KEYS, PROMPT_ROWS, Call, Stamps
from warpline.engine.executors.cpu.forms import in_panels, padded, panelled
from warpline.engine.executors.cpu.table import load, path_of, save
from warpline.engine.executors.sampling import advance
from warpline.engine.request import Needs, Span
from warpline.engine.slots import Slots
from warpline.errors import DeviceError
from warpline.kernels.cpu import library
from warpline.kernels.cpu.team import Team
from warpline.model.screen import Screen
from warpline.model.weights import Weights

#: Bytes of weights below which a model is small.
SMALL = 100_000_000
#: Bounds on the assumed cost of one more row of a pass, as a share of the pass with one; and the number of
#: measurements.
LEAST_PRICE, MOST_PRICE, TRIALS = 0.05, 0.9, 5
#: Factor by which a draft must be likelier than it costs: chances are estimates, and choosing its token takes time too.
MARGIN = 1.5


class CpuExecutor(Executor):
    """Decodes many tokens in one call."""

    name = "cpu"
    dtypes = tuple(WEIGHT_BYTES)
    can_be_invariant = can_speculate = True

    def __init__(
        self, weights: Weights, device: torch.device, dtype: str, *, threads: int | None = None, screened: bool = True
    ):
        if device.type != "cpu":
            raise DeviceError("the cpu executor runs on a CPU: use --device cpu, or another executor here")
        super().__init__(weights, device, dtype)
        # The team waits for the host's work. A step of a small model takes less than a millisecond, so a report every
        # sixteen steps is enough for streams.
        is_small = sum(tensor.nbytes for tensor in weights.tensors.values()) < SMALL
        self.chunk, self.most_steps, self.crowd = 16, 32, 0 if is_small else 4
        self.threads = threads or hardware.threads()
        self._program = _program(weights.config, dtype)
        self._team = Team(self.threads)
        weakref.finalize(self, self._team.close).atexit = False  # a thread must not wake while Python ends
        self._alone = threading.Lock()
        self._head = weights.head
        self._tensors = panelled(weights.tensors, self._head)
        self._screen = None
        if screened and dtype != "int8":  # int8 weights are codes already
            found = Screen.of(weights.tensors[f"{self._head}.weight"])
            self._screen = replace(found, codes=in_panels(found.codes), scale=padded(found.scale))
        self._table: np.ndarray | None = None
        self._calls: weakref.WeakKeyDictionary[Slots, Call] = weakref.WeakKeyDictionary()
        self._stamps: list[Stamps] | None = None  # of calls that are watched, of at most so many steps each
        self._stamped_steps = 1

    @classmethod
    def start_compiling(cls, config: ModelConfig, dtype: str) -> None:
        """Start compiling, on another core."""
        _program(config, dtype)

    def ready(self) -> None:
        """Wait for the compiler."""
        self._program.function()

    def set_up(self, asked: EngineConfig, model: str) -> None:
        """Apply options that hold for all sequences."""
        super().set_up(asked, model)
        if asked.speculate != "off":
            self.drafts = asked.speculative_tokens
            if asked.speculative_table:
                path = path_of(model, self.config)
                self._table = load(path)
                weakref.finalize(self, save, path, self._table)  # at the latest when Python ends

    @torch.inference_mode()
    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        """Run the layers for every token; then the end of a decode step."""
        call, ends = self._call(slots), [span for span in spans if span.lanes]
        x, attended = self._through_layers(call, spans)
        if ends:
            lanes = [lane for span in ends for lane in span.lanes]
            source = [i for i, span in enumerate(ends) for _ in span.lanes]  # the end that each lane follows from
            call.x[: len(lanes)], call.attended[: len(lanes)] = x[source], attended[source]
            screens = self.screens(slots, lanes)
            self._run(call, lambda: call.ready(slots, lanes, first=BEHIND_ATTENTION, screens=screens))

    def _through_layers(self, call: Call, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the spans' tokens. For the last token of each span that names lanes, return the
        input rows of the last layer and the results of its attention."""
        slots = np.repeat([span.slot for span in spans], [span.end - span.start for span in spans])
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        behind = np.cumsum([span.end - span.start for span in spans]) - 1
        last = behind[[bool(span.lanes) for span in spans]]
        found: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(slots), PROMPT_ROWS):
            here = slice(first, first + PROMPT_ROWS)
            ending = torch.from_numpy(last[(last >= here.start) & (last < here.stop)] - first)
            end = BEHIND_ATTENTION if len(ending) else BEHIND_KEYS
            self._run(call, partial(call.given, slots[here].tolist(), positions[here], end=end))
            found.append((call.x[ending], call.attended[ending]))
        x, attended = (torch.cat(parts) for parts in zip(*found, strict=True))
        return x, attended

    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        """Run all steps in one call, or each in its own if they are traced."""
        call, at_once = self._call(slots), n if self._mark is None else 1
        for _ in range(0, n, max(at_once, 1)):
            self._reached("decode")
            screens = self.screens(slots, lanes)
            self._run(call, partial(call.newest, slots, lanes, at_once, chooses=True, screens=screens))
            if call.halts:
                break

    def halt(self, slots: Slots, wanted: bool) -> None:
        """Set the word that the team reads after every step."""
        if (call := self._calls.get(slots)) is not None:
            call.halts = wanted

    def stops_by_itself(self, lanes: int, needs: Needs) -> bool:
        """Always true: the team checks before every step."""
        return True

    def counted(self, slots: Slots) -> Drafted | None:
        """Return the counts of drafts, or None without drafts."""
        return self._call(slots).counted() if self.drafts else None

    def screens(self, slots: Slots, lanes: Sequence[int]) -> bool:
        """Whether codes of the LM head can say which logits are needed; several rows in half precision would be no
        faster with them."""
        needs = slots.needs(lanes)
        all_logits = needs.logprobs is not None or needs.filters_beside_top_p
        return self._screen is not None and not all_logits and (self.dtype == "fp32" or len(lanes) == 1)

    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Return the logits; nothing else of a step is left afterwards."""
        call = self._call(slots)
        self._run(call, lambda: call.newest(slots, lanes, 1, chooses=False))
        logits = call.logits[: len(lanes)].clone()
        with torch.inference_mode():
            advance(slots, lanes, logits)
        return {"logits": logits}

    @contextmanager
    def stamped(self, slots: Slots, steps: int = 1) -> Iterator[list[Stamps]]:
        """While this is open, threads store their clocks in every call of at most `steps` steps. Yields a list to which
        the clocks of each call are added."""
        self._call(slots)
        self._stamps, self._stamped_steps = [], steps
        try:
            yield self._stamps
        finally:
            self._stamps = None

    def _run(self, call: Call, told: Callable[[], int]) -> None:
        """Run the team on the words whose address `told` returns. The lock admits one call at a time."""
        with self._alone:
            if self._stamps is not None:
                call.stamp(self._stamped_steps)
            address, function = told(), self._program.function()
            self._team.run(lambda me: function(me, address))
            if self._stamps is not None:
                self._stamps.append(call.stamped())
                call.stamp(0)

    def _call(self, slots: Slots) -> Call:
        if (call := self._calls.get(slots)) is None:
            call = Call(
                self.config, self._tensors, self._head, slots, screen=self._screen, threads=self.threads,
                drafts=self.drafts, table=self._table,
            )  # fmt: skip
            self._calls[slots] = call
            if self.drafts:
                call.price = self._measured_price(call, slots)
        return call

    def _measured_price(self, call: Call, slots: Slots) -> float:
        """Measure the cost of one more row, in the parking slot. Drafts that are less likely than this are not run."""
        rows, taken = min(self.drafts, slots.capacity - 1), dict[int, float]()
        for _ in range(TRIALS):
            for count in (1, 1 + rows):
                told = partial(call.given, [slots.parking] * count, np.arange(count), screens=self._screen is not None)
                begun = time.perf_counter()
                self._run(call, told)
                taken[count] = min(taken.get(count, math.inf), time.perf_counter() - begun)
        price = MARGIN * (taken[1 + rows] / taken[1] - 1) / rows if rows else MOST_PRICE
        return min(max(price, LEAST_PRICE), MOST_PRICE)


def _program(config: ModelConfig, dtype: str) -> library.Build:
    return library.build(dtype, KV_DTYPES[dtype], ACTIVATIONS[config.activation_function])
