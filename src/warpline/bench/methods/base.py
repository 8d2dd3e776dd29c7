"""What a method is: built from weights for one case, then asked for tokens."""

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

#: About what torch.compile takes for a case, for planning.
COMPILE_SECONDS = 25.0


class Converted:
    """A folder with a model in another engine's form, kept for the cases in a row that share its weights."""

    def __init__(self, convert: Callable[[Weights, Path], object]) -> None:
        self._convert = convert
        self._of: object = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self._drop)

    def folder(self, weights: Weights) -> Path:
        """Filled now, unless the last one is from the same tensors."""
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
    """Sees a method run: it is told where steps begin, and which part of the model the host is in."""

    def step(self) -> None:
        """A pass over prompts begins, or a decode step."""

    def part(self, step: ModelOp, layer: int | None) -> AbstractContextManager[object]:
        """Around a step of the model."""

    def module(self, name: str) -> Callable[[], AbstractContextManager[object]] | None:
        """What to enter around a module that transformers calls so; None where it has no place of its own."""


#: What is done before a clock is written, and in which layer.
Moment = tuple[str, int | None]


class Stamped(NamedTuple):
    """Launches of many tokens, seen from inside."""

    us: list[float]  # of each launch, per token
    clocks: Tensor  # [blocks or threads, tokens * moments], of the last
    moments: list[Moment]
    screened: bool  # whether codes of the LM head were read instead of the head


class StampedPrompts(NamedTuple):
    """Passes over prompts, each a few calls, seen from inside."""

    us: list[float]  # of each pass
    calls: list[tuple[Tensor, list[Moment]]]  # of the median: nanoseconds [thread, 1 + moment] from a call's begin on


class Counts(NamedTuple):
    """What an engine has done so far."""

    steps: int
    lane_steps: int
    busy_seconds: float
    idle_seconds: float


class Method(ABC):
    """Greedy generation with given weights. Calls may return before the device has finished."""

    #: Name of what it is, for people.
    title: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    packages: tuple[str, ...] = ()  # what it needs beyond torch, and the extra that brings it
    extra: str = "peers"
    windows: bool = False  # whether it knows sliding windows
    #: Whether it computes what the weights say; if not, how many tokens agree is reported instead of required.
    exact: bool = True
    #: How it stores weights, if not as the case says.
    stored: str | None = None
    #: How it stores keys and values, if not as its activations.
    kv_stored: str | None = None
    #: Whether torch.compile makes its code, and whether the whole text goes through the model for every token.
    compiled: bool = False
    recomputes: bool = False
    #: Generations before the one that is judged and the ones that are timed: what compiles needs some.
    warm_up: int = 0
    #: About how long it takes before its first token, for planning a run that may not take long.
    startup_seconds: float = 1.0
    #: How it answers requests of different lengths: "together", as slots become free, or in "padded" batches.
    serves: str | None = None
    #: Of padded batches: whether prompts may differ in length after all, and whether shapes should be few.
    ragged: bool = False
    fixed: bool = False
    #: Why nothing can be seen of how it computes, where it cannot be watched.
    unseen: str = "computes outside of torch, and nothing can be seen of it: 'warpline bench' times it"
    #: Whether only the order of its products tells which module a kernel belongs to.
    by_order: bool = False

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        self.weights, self.case, self.device = weights, case, device

    @classmethod
    def obstacle(cls, case: Case, device: torch.device) -> str | None:
        """Why it cannot run this case here, if it cannot: a missing package, a dtype, a device."""
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
        """What is not installed, if something is not."""
        absent = next((package for package in cls.packages if importlib.util.find_spec(package) is None), None)
        return None if absent is None else f"{absent} is not installed: pip install 'warpline[{cls.extra}]'"

    @classmethod  # noqa: B027 - most have nothing to begin
    def start_compiling(cls, case: Case, device: torch.device) -> None:
        """Begin what takes long and needs no weights, as a program would that loads them meanwhile."""

    def given(self, prompts: Tensor) -> Any:
        """Prompts [B, P] on the device in the form in which `generate` takes them; making it is not timed. Those that
        are asked for tokens on the device get them there; those that begin and end on the host get ids there."""
        return prompts

    @abstractmethod
    def generate(self, prompts: Any, new: int) -> Any:
        """`new` tokens behind what `given` made of prompts, never ending early, as a user of the method gets them."""

    def ids(self, prompts: Tensor) -> Any:
        """Prompts [B, P] as a user of the method has them before it begins: on the host."""
        return prompts.cpu()

    def answer(self, ids: Any, new: int) -> Any:
        """`generate` from ids on the host to tokens on the host, which is what is timed: nobody has one without the
        other."""
        return self.generate(self.given(ids.to(self.device)), new).cpu()

    def tokens(self, answer: Any) -> Tensor:
        """What `generate` or `answer` gave, as a tensor [B, new]: this is not timed."""
        assert isinstance(answer, Tensor)
        return answer

    def serve(self, asked: Sequence[Asked], batch: int) -> Iterator[list[list[int]]]:
        """The tokens of requests that come all at once, some of them at a time, in their order. Ids come from the host
        and tokens go there."""
        for some in self.batches(asked, batch):
            tokens = self.complete(some, some.new)
            yield [row[: one.new] for row, one in zip(tokens, some.asked, strict=False)]

    def batches(self, asked: Sequence[Asked], size: int) -> list[Batch]:
        """Which requests it answers together."""
        return list(batches(asked, size, self.weights.config.n_positions, ragged=self.ragged, fixed=self.fixed))

    def complete(self, batch: Batch, new: int) -> list[list[int]]:
        """So many tokens for each of its prompts."""
        prompts = batch.prompts if self.ragged else self.given(batch.rectangle.to(self.device))
        tokens: list[list[int]] = self.generate(prompts, new).tolist()
        return tokens

    def counts(self) -> Counts | None:
        """What its engine has done, where it has one."""
        return None

    # --- to be looked into --------------------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> AbstractContextManager[object]:
        """While this is open, the watcher is told what happens."""
        raise ConfigError(f"{self.title} {self.unseen}")

    def table(self, phase: str) -> Sequence[OpCall] | None:
        """The ops of the last pass of a phase, where there is a table of them."""
        return None

    def stamped(self, prompts: Any, tokens: int, runs: int) -> Stamped | None:
        """Launches of so many tokens, behind one that is not counted; None where a launch is not many tokens."""
        return None

    def stamped_prompts(self, prompts: Any, runs: int) -> StampedPrompts | None:
        """Passes over the prompts, behind one that is not counted; None where they are seen from outside."""
        return None

    # --- what it takes ------------------------------------------------------------------------------------------------

    def peak_bytes(self) -> int:
        """The most memory it has taken: on a GPU what was allocated, else of the whole process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return hardware.peak_process_bytes()

    def close(self) -> None:
        """Let go of what it holds."""
        del self.weights


class InInt8(Method):
    """A method with int8 weights. Not what the others compute, so its tokens may differ; the row says how many do."""

    exact = False
    stored = "int8"

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(quantised(weights), replace(case, dtype="int8"), device)
