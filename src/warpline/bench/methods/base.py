"""The interface of a method: it is built from weights for one case, then asked for tokens."""

from __future__ import annotations

import atexit
import importlib.util
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from warpline import hardware
from warpline.bench.requests import Asked, Batch, batches
from warpline.bench.workloads import Case
from warpline.errors import ConfigError
from warpline.model.parameters import ModelOp
from warpline.model.quantise import quantised
from warpline.model.weights import Weights

if TYPE_CHECKING:
    from warpline.engine.executors.graph.schedule import OpCall

#: About how long torch.compile takes for a case in seconds, for planning.
COMPILE_SECONDS = 25.0


class Converted:
    """A folder with the model in another engine's form, kept for consecutive cases that share its weights."""

    def __init__(self, convert: Callable[[Weights, Path], object]) -> None:
        self._convert = convert
        self._of: object = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self._drop)

    def folder(self, weights: Weights) -> Path:
        """Return the folder; convert into it first unless it was made from the same tensors."""
        if self._folder is None or self._of is not weights.tensors:
            self._drop()
            self._folder = tempfile.TemporaryDirectory(prefix="warpline-peer-")
            self._of = weights.tensors
            self._convert(weights, Path(self._folder.name))
        return Path(self._folder.name)

    def _drop(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self._of = None


class Watcher(Protocol):
    """Sees a method run: it is told where steps begin, and which part of the model the host executes."""

    def step(self) -> None:
        """Called when a pass over prompts or a decode step begins."""

    def part(self, step: ModelOp, layer: int | None) -> AbstractContextManager[object]:
        """Return the context to enter around a step of the model."""

    def module(self, name: str) -> Callable[[], AbstractContextManager[object]] | None:
        """Return what to enter around the transformers module of this name; None where it has no counterpart here."""


#: What is done before a clock is written, and the layer; None outside of the layers.
StampName = tuple[str, int | None]


class Stamped(NamedTuple):
    """Launches of many tokens, with the clocks that were written inside the last of them."""

    us: list[float]  # of each launch, per token
    clocks: Tensor  # [blocks or threads, tokens * moments], of the last launch
    moments: list[StampName]
    screened: bool  # whether codes of the LM head were read instead of the head


class StampedPrompts(NamedTuple):
    """Passes over prompts, each of one or more calls, with the clocks that were written inside one of them."""

    us: list[float]  # of each pass
    calls: list[tuple[Tensor, list[StampName]]]  # of the median pass: nanoseconds [thread, 1 + moment] of each call
    screened: bool  # whether codes of the LM head were read instead of the head


class Counts(NamedTuple):
    """Counters of an engine since its start."""

    steps: int
    lane_steps: int
    busy_seconds: float
    idle_seconds: float


class Method(ABC):
    """Greedy generation with given weights. Calls may return before the device has finished."""

    #: Name of the method as shown in tables.
    title: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    packages: tuple[str, ...] = ()  # packages it needs beyond torch, and the extra that installs them
    extra: str = "peers"
    windows: bool = False  # whether it supports sliding windows
    #: Whether it computes what the weights say; if not, the share of agreeing tokens is reported instead of required.
    exact: bool = True
    #: Dtype of its weights, if not the case's.
    stored: str | None = None
    #: Dtype of its keys and values, if not that of its activations.
    kv_stored: str | None = None
    #: Whether torch.compile makes its code, and whether it runs the whole text through the model for every token.
    compiled: bool = False
    recomputes: bool = False
    #: Generations before the judged and the timed ones: compiled methods need some.
    warm_up: int = 0
    #: About how many seconds it takes before its first token, for planning a run with a time limit.
    startup_seconds: float = 1.0
    #: How it answers requests of different lengths: "together", as slots become free, or in "padded" batches.
    serves: str | None = None
    #: For padded batches: whether prompts may still differ in length, and whether there should be few shapes.
    ragged: bool = False
    fixed: bool = False
    #: Why its computation cannot be watched, where it cannot.
    unseen: str = "computes outside of torch, and nothing can be seen of it: 'warpline bench' times it"
    #: Whether only the order of its matrix products tells which module a kernel belongs to.
    by_order: bool = False

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        self.weights, self.case, self.device = weights, case, device

    @classmethod
    def obstacle(cls, case: Case, device: torch.device) -> str | None:
        """Return why it cannot run this case here: a missing package, a dtype, a device. None if it can."""
        if device.type not in cls.devices:
            return f"runs on {' and '.join(cls.devices)} only"
        if case.dtype not in cls.dtypes:
            return f"has no {case.dtype}"
        if case.window is not None and not cls.windows:
            return "knows no sliding window"
        if case.kind == "throughput" and cls.serves is None:
            return "is not measured with requests of unequal lengths"
        return cls.missing()

    @classmethod
    def missing(cls) -> str | None:
        """Return which package is not installed and how to install it; None if all are there."""
        absent = next((package for package in cls.packages if importlib.util.find_spec(package) is None), None)
        return None if absent is None else f"{absent} is not installed: pip install 'warpline[{cls.extra}]'"

    @classmethod  # noqa: B027 - most have nothing to begin
    def start_compiling(cls, case: Case, device: torch.device) -> None:
        """Start what takes long and needs no weights, while the caller loads them."""

    def given(self, prompts: Tensor) -> Any:
        """Return prompts [B, P] in the form `generate` takes; this is not timed. Methods that begin on the device get
        them there, methods that begin and end on the host get ids on the host."""
        return prompts

    @abstractmethod
    def generate(self, prompts: Any, new: int) -> Any:
        """Generate `new` tokens after what `given` returned, without early stop, as a user of the method gets them."""

    def ids(self, prompts: Tensor) -> Any:
        """Return prompts [B, P] as a user of the method holds them before the call: on the host."""
        return prompts.cpu()

    def answer(self, ids: Any, new: int) -> Any:
        """Generate from ids on the host to tokens on the host. This is timed, because every user pays for both
        copies."""
        return self.generate(self.given(ids.to(self.device)), new).cpu()

    def tokens(self, answer: Any) -> Tensor:
        """Return the result of `generate` or `answer` as a tensor [B, new]; this is not timed."""
        assert isinstance(answer, Tensor)
        return answer

    def serve(self, asked: Sequence[Asked], batch: int) -> Iterator[list[list[int]]]:
        """Yield the tokens of requests that arrive all at once, several at a time, in their order. Ids come from the
        host and tokens return to it."""
        for some in self.batches(asked, batch):
            tokens = self.complete(some, some.new)
            yield [row[: one.new] for row, one in zip(tokens, some.asked, strict=False)]

    def batches(self, asked: Sequence[Asked], size: int) -> list[Batch]:
        """Return the batches in which it answers the requests."""
        return list(batches(asked, size, self.weights.config.n_positions, ragged=self.ragged, fixed=self.fixed))

    def complete(self, batch: Batch, new: int) -> list[list[int]]:
        """Return `new` tokens for each prompt of the batch."""
        prompts = batch.prompts if self.ragged else self.given(batch.rectangle.to(self.device))
        tokens: list[list[int]] = self.generate(prompts, new).tolist()
        return tokens

    def counts(self) -> Counts | None:
        """Return the counters of its engine; None if it has none."""
        return None

    # --- observation --------------------------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> AbstractContextManager[object]:
        """Report steps and model parts to the watcher while the context is open."""
        raise ConfigError(f"{self.title} {self.unseen}")

    def table(self, phase: str) -> Sequence[OpCall] | None:
        """Return the ops of the last pass of a phase; None if the method has no op table."""
        return None

    def stamped(self, prompts: Any, tokens: int, runs: int) -> Stamped | None:
        """Return the clocks of `runs` launches after a warm-up; None where a launch does not decode many tokens."""
        return None

    def stamped_prompts(self, prompts: Any, runs: int) -> StampedPrompts | None:
        """Return the clocks of `runs` passes after a warm-up; None where the profiler sees them from outside."""
        return None

    # --- resources ----------------------------------------------------------------------------------------------------

    def peak_bytes(self) -> int:
        """Return the peak memory in bytes: on a GPU what torch allocated, else that of the whole process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return hardware.peak_process_bytes()

    def close(self) -> None:
        """Release the weights and everything else it holds."""
        del self.weights


class InInt8(Method):
    """A method with int8 weights. Its tokens may differ from the others'; the row says how many agree."""

    exact = False
    stored = "int8"

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(quantised(weights), replace(case, dtype="int8"), device)
