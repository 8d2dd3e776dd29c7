"""The interface between the engine and whatever computes: `prefill`, `decode`, and the choice among executors."""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from warpline.config import ACTIVATIONS, DTYPE_BYTES, KV_DTYPES, ModelConfig
from warpline.engine.state import State
from warpline.errors import ConfigError, KernelError
from warpline.hardware import ARCH_LIMITS
from warpline.model.weights import TORCH_DTYPES, Weights

#: Every executor and its home; loaded when chosen.
EXECUTORS = {
    "auto": "warpline.engine.auto_exec:AutoExecutor",
    "torch": "warpline.engine.torch_exec:TorchExecutor",
    "cpu": "warpline.engine.cpu_exec:CpuExecutor",
    "kernels": "warpline.engine.kernels_exec:KernelsExecutor",
    "graph": "warpline.engine.graph_exec:GraphExecutor",
    "persistent": "warpline.engine.persistent_exec:PersistentExecutor",
}

logger = logging.getLogger(__name__)


class Executor(ABC):
    """Computes tokens. Reads and writes `State`; keeps nothing of a request but what is bound to a state's memory."""

    name: str
    #: Tokens to decode between two looks of the host, at most.
    chunk: int = 1
    #: How weights may be stored.
    dtypes: Collection[str] = tuple(DTYPE_BYTES)
    #: Sequences that can be decoded together, if not any number.
    most_rows: int | None = None

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        self.config, self.device, self.dtype = weights.config, device, dtype

    @classmethod  # noqa: B027 - most have nothing to begin
    def begin(cls, config: ModelConfig, dtype: str) -> None:
        """Begin what takes long and needs no weights, which may be loaded meanwhile."""

    @property
    def described(self) -> str:
        """Its name, and what it chose where it chooses."""
        return self.name

    def allocate(self, rows: int, capacity: int) -> State:
        """Buffers for a batch."""
        return State(self.config, rows, capacity, device=self.device, dtype=TORCH_DTYPES[KV_DTYPES[self.dtype]])

    def prefill(self, state: State) -> None:
        """Run the prompts that `state.begin` took in, and append each row's first token."""
        with self._on_device():
            self._prefill(state)
        state.longest += 1

    def decode(self, state: State, n: int) -> None:
        """Append `n` more tokens to every row that is not done. May return before the device has finished."""
        with self._on_device():
            self._decode(state, n)
        state.longest = min(state.longest + n, state.capacity)

    def stops_by_itself(self, state: State) -> bool:
        """Whether decoding ends when every row has ended, so that no step is wasted if the host does not look."""
        return False

    def at_once(self, state: State, left: int) -> int:
        """Steps to take before the host looks again, where nobody reads along: a chunk, or all that are left, on a GPU
        and if none can be wasted, because no row may end before its limit or decoding ends with the rows."""
        wasteful = state.may_end and not self.stops_by_itself(state)
        return min(self.chunk, left) if wasteful or self.device.type != "cuda" else left

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise what went wrong on the device, if anything; called when the host has waited for it."""

    def observe(self, state: State) -> dict[str, Tensor]:
        """Decode one step of a state that was restarted, and show what it computed, under the names of `diff.order`: a
        row for each sequence."""
        raise ConfigError(f"the {self.name} executor does not show what it computes")

    def _on_device(self) -> AbstractContextManager[object]:
        """Launches go to the current GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @abstractmethod
    def _prefill(self, state: State) -> None:
        """Restart the state, fill the cache with `state.tokens` up to each row's length, then take one step as `State`
        describes it."""

    @abstractmethod
    def _decode(self, state: State, n: int) -> None:
        """Take `n` steps as `State` describes them. No row is longer than `state.longest` before the first."""


def choose(name: str, device: torch.device, config: ModelConfig, dtype: str) -> str:
    """Resolve "auto" where nothing is left to choose: a CPU has an executor of its own, and on some GPUs only torch
    runs."""
    if dtype == "int8" and device.type == "cuda":
        raise ConfigError("int8 weights run on a CPU so far: use --device cpu, or --dtype fp16 on the GPU")
    if name != "auto":
        return name
    if device.type != "cuda":
        logger.info("executor auto → cpu: there is no GPU")
        return "cpu"
    reason = _reason_for_torch(device, config, dtype)
    if reason is None:
        return name
    logger.info("executor auto → torch: %s", reason)
    return "torch"


def _reason_for_torch(device: torch.device, config: ModelConfig, dtype: str) -> str | None:
    """Why our kernels cannot run this model on this GPU, if so."""
    from warpline.kernels import compile as compiler
    from warpline.kernels import launch
    from warpline.kernels.catalog import find
    from warpline.kernels.spec import Variant

    if ACTIVATIONS[config.activation_function] != "gelu_tanh":
        return f"no other runs {config.activation_function}"
    arch = launch.arch_of(device.index if device.index is not None else torch.cuda.current_device())
    if arch not in ARCH_LIMITS:
        return f"the kernels are not made for {arch}"
    try:
        compiler.nvrtc_version()
    except KernelError as error:
        return str(error)
    dims = {"batch": 1, "heads": config.n_head, "queries": 64, "keys": 64, "depth": config.head_size}
    needed = Variant.of(find("flash_attention"), dtype, dims, arch).launch(dims).shared_bytes
    if needed > ARCH_LIMITS[arch].block_shared_bytes:
        return f"heads of {config.head_size} need {needed:,} bytes of shared memory, which this GPU has not"
    return None


def _kind(name: str, dtype: str) -> type[Executor]:
    module, _, attribute = EXECUTORS[name].partition(":")
    kind: type[Executor] = getattr(importlib.import_module(module), attribute)
    if dtype not in kind.dtypes:
        raise ConfigError(f"the {name} executor has no {dtype}: use one of {', '.join(kind.dtypes)}, or --executor cpu")
    return kind


def begin(name: str, config: ModelConfig, device: torch.device, dtype: str) -> None:
    """Begin what the executor called `name` needs before it has weights."""
    if device.type == "cpu":
        _kind(name, dtype).begin(config, dtype)


def create(name: str, weights: Weights, device: torch.device, dtype: str) -> Executor:
    """Make the executor called `name`."""
    return _kind(name, dtype)(weights, device, dtype)
