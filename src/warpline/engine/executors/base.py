"""The interface between the engine and its executors: `prefill` and `decode`, over slots.

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

#: Called before every step that the host sees: a pass over prompts ("prefill") or one decode step ("decode").
Mark = Callable[[str], None]


class Executor(ABC):
    """Computes the tokens of sequences in `Slots`."""

    name: str
    #: Most steps of a launch: `chunk` where sequences may end early or a reader follows them, `most_steps` otherwise.
    chunk: int = 1
    most_steps: int = 1
    #: Number of streams beyond which launches take more steps: each stream costs the host time per launch.
    crowd: int = 32
    #: The dtypes in which weights may be stored.
    dtypes: Collection[str] = tuple(DTYPE_BYTES)
    #: Most sequences that can be decoded together; None: any number.
    most_lanes: int | None = None
    #: Most tokens of prompts that run at once.
    prompt_tokens: int = 2048
    #: Whether requests and tokens are transferred by ops of the catalog.
    native: bool = False
    #: Whether it keeps the weights once more, in the order in which it reads them.
    has_tape: bool = False
    #: Whether it can give a row the same bits in any batch (`deterministic="batch"`).
    can_be_invariant: bool = False
    #: Whether a row's bits must depend on its own tokens only.
    invariant: bool = False
    #: Whether its KV cache may hold codes (`kv_dtype="int8"`), and the dtype of the cache; None: that of the
    #: activations.
    can_quantise_kv: bool = False
    kv_dtype: str | None = None
    #: Whether it can run drafts (`speculate="ngram"`), and the number of draft tokens per sequence and step.
    can_speculate: bool = False
    drafts: int = 0

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        self.config, self.device, self.dtype = weights.config, device, dtype
        #: The torch dtype of keys and values.
        self.cached = TORCH_DTYPES[KV_DTYPES[dtype]]
        self._mark: Mark | None = None

    @classmethod  # noqa: B027 - most have nothing to compile
    def start_compiling(cls, config: ModelConfig, dtype: str) -> None:
        """Start work that takes long and needs no weights; they may be loaded meanwhile."""

    def ready(self) -> None:  # noqa: B027
        """Wait for what `start_compiling` started."""

    def set_up(self, asked: EngineConfig, model: str) -> None:
        """Apply options that hold for all sequences. Called before the first of them."""
        self.invariant, self.kv_dtype = asked.deterministic == "batch", asked.kv_dtype

    @property
    def described(self) -> str:
        """Its name, and which executor it chose if it chooses."""
        return self.name

    def allocate(self, count: int, capacity: int) -> Slots:
        """Allocate slots for `count` sequences of up to `capacity` positions."""
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
        """Whether decoding of so many lanes with such needs ends when every sequence has ended, so that no step is
        wasted while the host does not look."""
        return False

    def screens(self, slots: Slots, lanes: Sequence[int]) -> bool:
        """Whether decoding these lanes reads the codes of the LM head instead of the head."""
        return False

    def halt(self, slots: Slots, wanted: bool) -> None:  # noqa: B027 - most launches cannot be reached
        """Ask decoding to end after the current step, until `wanted` is false again. Any thread may call it."""

    def compile_ahead(self, slots: Slots, lanes: Sequence[int]) -> None:  # noqa: B027 - most have nothing to compile
        """Start compiling what decodes these lanes, while their prompts run."""

    def prepare_all(self, slots: Slots) -> None:  # noqa: B027 - most have nothing to prepare
        """Compile, bind and capture all that any number of these slots may need, so that no request waits for it."""

    def counted(self, slots: Slots) -> Drafted | None:
        """Return the counts of drafts since the last call, or None if there are no drafts."""
        return None

    def fault(self) -> DeviceError:
        """Return the error for a launch that ended itself."""
        return DeviceError("a launch made no progress and ended itself: try again")

    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Decode one step and return what it computed, by the names of `schedule.order`, with one row per lane."""
        raise ConfigError(f"the {self.name} executor does not show what it computes")

    def table(self, phase: str) -> list[OpCall] | None:
        """Return the ops of the last pass of a phase ("prefill", "decode"), or None if it is not made of ops."""
        return None

    @contextmanager
    def trace(self, mark: Mark) -> Iterator[None]:
        """While this is open, `mark` is called before each step. Executors that take many steps in one call then take
        them one by one."""
        before, self._mark = self._mark, mark
        try:
            yield
        finally:
            self._mark = before

    def _reached(self, phase: str) -> None:
        if self._mark is not None:
            self._mark(phase)

    def on_device(self) -> AbstractContextManager[object]:
        """Return a context in which launches go to the executor's GPU."""
        if self.device.type != "cuda" or self.device.index in (None, torch.cuda.current_device()):
            return nullcontext()
        return torch.cuda.device(self.device)

    @abstractmethod
    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        """Fill the cache at the spans' positions from `slots.tokens`, then take one step, as `Slots` describes it, for
        every lane that a span names."""

    @abstractmethod
    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        """Take `n` steps as `Slots` describes them."""
