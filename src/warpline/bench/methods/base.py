"""What a method is: built from weights for one case, then asked for tokens."""

from __future__ import annotations

import atexit
import importlib.util
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from warpline import hardware
from warpline.bench.workloads import Case
from warpline.model.weights import Weights

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
    #: Generations before the one that is judged and the ones that are timed: what compiles needs some.
    warm_up: int = 0
    #: About how long it takes before its first token, for planning a run that may not take long.
    startup_seconds: float = 1.0

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
        return cls.missing()

    @classmethod
    def missing(cls) -> str | None:
        """What is not installed, if something is not."""
        absent = next((package for package in cls.packages if importlib.util.find_spec(package) is None), None)
        return None if absent is None else f"{absent} is not installed: pip install 'warpline[{cls.extra}]'"

    @classmethod  # noqa: B027 - most have nothing to begin
    def begin(cls, case: Case, device: torch.device) -> None:
        """Begin what takes long and needs no weights, as a program would that loads them meanwhile."""

    @abstractmethod
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """`new` tokens [B, new] behind `prompts` [B, P], never ending early."""

    def peak_bytes(self) -> int:
        """The most memory it has taken: on a GPU what was allocated, else of the whole process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return hardware.peak_process_bytes()

    def close(self) -> None:
        """Let go of what it holds."""
        del self.weights
