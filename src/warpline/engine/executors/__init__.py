"""Executors compute tokens. `resolve`, `start_compiling` and `create` find one by name."""

from __future__ import annotations

import importlib
import logging

import torch

from warpline.config import ACTIVATIONS, KV_DTYPES, EngineConfig, ModelConfig
from warpline.engine.executors.base import Executor
from warpline.errors import ConfigError, KernelError
from warpline.hardware import ARCH_LIMITS
from warpline.model.weights import Weights

__all__ = ["EXECUTORS", "Executor", "create", "resolve", "start_compiling"]

#: Every executor and its module, which is imported when the executor is chosen.
EXECUTORS = {
    "auto": "warpline.engine.executors.auto:AutoExecutor",
    "torch": "warpline.engine.executors.pytorch:TorchExecutor",
    "cpu": "warpline.engine.executors.cpu.executor:CpuExecutor",
    "kernels": "warpline.engine.executors.graph.kernels:KernelsExecutor",
    "graph": "warpline.engine.executors.graph.executor:GraphExecutor",
    "persistent": "warpline.engine.executors.persistent.executor:PersistentExecutor",
}

logger = logging.getLogger(__name__)


def resolve(name: str, device: torch.device, config: ModelConfig, dtype: str) -> str:
    """Resolve "auto" where there is no choice: to cpu without a GPU, and to torch, with a warning because it is slow,
    on GPUs where our kernels do not run."""
    if name != "auto":
        return name
    if device.type != "cuda":
        logger.info("executor auto → cpu: there is no GPU")
        return "cpu"
    reason = _reason_for_torch(device, config, dtype)
    if reason is None:
        return name
    logger.warning("executor auto → torch, many times slower than our kernels: %s", reason)
    return "torch"


def _reason_for_torch(device: torch.device, config: ModelConfig, dtype: str) -> str | None:
    """Return why our kernels cannot run this model on this GPU, or None."""
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
    needed = Variant.of(find("flash_attention"), KV_DTYPES[dtype], dims, arch).launch(dims).shared_bytes
    if needed > ARCH_LIMITS[arch].block_shared_bytes:
        return f"heads of {config.head_size} need {needed:,} bytes of shared memory, which this GPU does not have"
    return None


def _kind(name: str, dtype: str) -> type[Executor]:
    module, _, attribute = EXECUTORS[name].partition(":")
    kind: type[Executor] = getattr(importlib.import_module(module), attribute)
    if dtype not in kind.dtypes:
        known = ", ".join(kind.dtypes)
        raise ConfigError(f"the {name} executor has no {dtype}: use one of {known}, or --executor auto")
    return kind


def start_compiling(name: str, config: ModelConfig, device: torch.device, dtype: str) -> None:
    """Start compiling what the executor called `name` needs before it has weights."""
    if device.type == "cpu":
        _kind(name, dtype).start_compiling(config, dtype)


def create(
    name: str, weights: Weights, device: torch.device, dtype: str, asked: EngineConfig | None = None
) -> Executor:
    """Make the executor called `name` with the options `asked`."""
    asked, kind = asked or EngineConfig(), _kind(name, dtype)
    if asked.deterministic != "off" and not kind.can_be_invariant:
        raise ConfigError(f"the {name} executor has no deterministic={asked.deterministic!r}: use --executor auto")
    if asked.speculate != "off" and not kind.can_speculate:
        raise ConfigError(f"the {name} executor has no speculate={asked.speculate!r}: use --executor cpu")
    if asked.kv_dtype is not None and not kind.can_quantise_kv:
        instead = "a GPU, where auto, graph and kernels have it, or --executor torch"
        raise ConfigError(f"the {name} executor has no kv_dtype={asked.kv_dtype!r}: use {instead}")
    made = kind(weights, device, dtype)
    made.set_up(asked, weights.name)
    return made
