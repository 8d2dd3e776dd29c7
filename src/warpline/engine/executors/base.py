"""The interface between the engine and whatever computes: `prefill` and `decode`, over slots.

Both may return before the device has finished; `Slots.report` brings the tokens. An executor keeps nothing of a
request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warpline.config import DTYPE_BYTES, KV_DTYPES, EngineConfig, ModelConfig
from warpline.engine.clock import Drafted
from warpline.engine.request import Needs, Span
from warpline.engine.slots import Slots
from warpline.errors import ConfigError, DeviceError
from warpline.model.weights import TORCH_DTYPES, Weights

if TYPE_CHECKING:
    from warpline.engine.executors.graph.schedule import OpCall

#: Called before every step that the host can see: a pass over prompts ("prefill") or one decode step ("decode").
Mark = Callable[[str], None]


class Executor(ABC):
    """Computes tokens in `Slots`."""

    name: str
    #: Steps between two looks of the host, at most: where sequences may end early or a reader follows them, and else.
    chunk: int = 1
    most_steps: int = 1
    #: Streams beyond which launches take more steps: a launch costs the host something for each of them.
    crowd: int = 32
    #: How weights may be stored.
    dtypes: Collection[str] = tuple(DTYPE_BYTES)
    #: Sequences that can be decoded together, if not any number.
    most_lanes: int | None = None
    #: Tokens of prompts that are run at once, at most.
    prompt_tokens: int = 2048
    #: Whether requests and tokens cross by ops of the catalog.
    native: bool = False
    #: Whether it can compute a row the same in any company (`deterministic="batch"`).
    can_be_invariant: bool = False
    #: Whether a row's bits must not depend on anything but its own tokens.
    invariant: bool = False
    #: Whether its KV cache may be codes (`kv_dtype="int8"`), and of which dtype it is, if not as the activations.
    can_quantise_kv: bool = False
    kv_dtype: str | None = None
    #: Whether it can run drafts (`speculate="ngram"`), and how many behind the newest token of a sequence.
    can_speculate: bool = False
    drafts: int = 0

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        self.config, self.device, self.dtype = weights.config, device, dtype
        #: What keys and values are kept in.
        self.cached = TORCH_DTYPES[KV_DTYPES[dtype]]
        self._mark: Mark | None = None

    @classmethod  # noqa: B027 - most have nothing to begin
    def start_compiling(cls, config: ModelConfig, dtype: str) -> None:
        """Begin what takes long and needs no weights, which may be loaded meanwhile."""

    def ready(self) -> None:  # noqa: B027
        """Wait for what `begin` began."""

    def set_up(self, asked: EngineConfig, model: str) -> None:
        """What holds for all sequences, before the first."""
        self.invariant, self.kv_dtype = asked.deterministic == "batch", asked.kv_dtype

    @property
    def described(self) -> str:
        """Its name, and what it chose where it chooses."""
        return self.name

    def allocate(self, count: int, capacity: int) -> Slots:
        """Slots for so many sequences of so many positions."""
        dtype = self.cached if self.kv_dtype is None else TORCH_DTYPES[self.kv_dtype]
        return Slots(self.config, count, capacity, device=self.device, dtype=dtype, native=self.native)

    def prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        """Run parts of prompts, and append the first token of every lane that they name."""
        self._reached("prefill")
        with self.on_device():
            self._prefill(slots, spans)

    def decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        """Append up to `n` more tokens to each of these slots that is not done."""
        if self.most_lanes is not None and len(lanes) > self.most_lanes:
            raise ConfigError(
                f"the {self.name} executor decodes up to {self.most_lanes} sequences of this model, not {len(lanes)}"
            )
        with self.on_device():
            self._decode(slots, lanes, n)

    def stops_by_itself(self, lanes: int, needs: Needs) -> bool:
        """Whether decoding so many lanes with such needs ends when every sequence has ended, so that no step is wasted
        if the host does not look."""
        return False

    def screens(self, slots: Slots, lanes: Sequence[int]) -> bool:
        """Whether decoding these lanes reads codes of the LM head instead of the head."""
        return False

    def halt(self, slots: Slots, wanted: bool) -> None:  # noqa: B027 - most launches cannot be reached
        """Have decoding end behind the step that it is at, until that is not wanted any more. From any thread."""

    def compile_ahead(self, slots: Slots, lanes: Sequence[int]) -> None:  # noqa: B027 - most have nothing to compile
        """Begin to compile what decodes these lanes, while their prompts are run."""

    def prepare_all(self, slots: Slots) -> None:  # noqa: B027 - most have nothing to prepare
        """Compile, bind and capture what any number of these slots may need, so that no request waits for it."""

    def counted(self, slots: Slots) -> Drafted | None:
        """What came of drafts since the last time, where there are any."""
        return None

    def fault(self) -> DeviceError:
        """What a launch that had to end itself means, in one line."""
        return DeviceError("a launch made no progress and ended itself: try again")

    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Decode one step, and show what it computed, under the names of `schedule.order`: a row for each lane."""
        raise ConfigError(f"the {self.name} executor does not show what it computes")

    def table(self, phase: str) -> list[OpCall] | None:
        """The ops of the last pass of a phase ("prefill", "decode"), where it is made of a table of them."""
        return None

    @contextmanager
    def trace(self, mark: Mark) -> Iterator[None]:
        """While this is open, `mark` is called before each step; executors that take many steps in one call take them
        one by one."""
        before, self._mark = self._mark, mark
        try:
            yield
        finally:
            self._mark = before

    def _reached(self, phase: str) -> None:
        if self._mark is not None:
            self._mark(phase)

    def on_device(self) -> AbstractContextManager[object]:
        """Launches go to the current GPU."""
        if self.device.type != "cuda" or self.device.index in (None, torch.cuda.current_device()):
            return nullcontext()
        return torch.cuda.device(self.device)

    @abstractmethod
    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        """Fill the cache at the spans' positions from `slots.tokens`, then take one step as `Slots` describes it for
        every lane that a span names."""

    @abstractmethod
    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        """Take `n` steps as `Slots` describes them."""
