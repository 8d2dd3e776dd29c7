"""The readable model and our executors."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from warpline.bench.methods.base import COMPILE_SECONDS, Method
from warpline.bench.workloads import Case
from warpline.config import SamplingParams
from warpline.engine import executor as executors
from warpline.engine.state import Request, State
from warpline.engine.torch_exec import TorchExecutor
from warpline.model.gpt2 import GPT2
from warpline.model.quantise import quantised
from warpline.model.weights import Weights, read_config


class Naive(Method):
    """The whole text through the model again for every token, attention step by step, as the textbook has it."""

    title = "naive PyTorch, no KV cache"
    windows = True

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        with torch.device("meta"):
            model = GPT2(case.windowed(weights.config), naive=True)
        model.load_state_dict(weights.tensors, assign=True)
        self.model: Any = model.requires_grad_(False).eval()

    @torch.inference_mode()
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Grow the text token by token."""
        text = prompts
        for _ in range(new):
            logits = self.model(text)[:, -1]  # of the last position; the model computes them all
            text = torch.cat((text, logits.argmax(dim=-1, keepdim=True)), dim=1)
        return text[:, prompts.shape[1] :]


class NaiveCompiled(Naive):
    """The same under torch.compile, which is told that lengths change."""

    title = "naive PyTorch, torch.compile"
    warm_up = 1
    startup_seconds = COMPILE_SECONDS

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        self.model = torch.compile(self.model, dynamic=True)


class _OnExecutor(Method):
    """One of our executors, without tokenizer and stop texts."""

    executor: str
    windows = True

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        config = case.windowed(weights.config)
        used = weights if config == weights.config else replace(weights, config=config)
        self._executor = executors.create(self.executor, used, device, case.dtype)
        self._state: State | None = None
        self._params = functools.cache(lambda new: SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))

    @classmethod
    def begin(cls, case: Case, device: torch.device) -> None:
        """As `LLM` does."""
        executors.begin(cls.executor, read_config(case.model), device, cls.stored or case.dtype)

    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Prefill and decode in one state, kept for the next time."""
        batch, length = prompts.shape
        if self._state is None:
            self._state = self._executor.allocate(self.case.batch, self.case.prompt + max(self.case.new, 1))
        state, params = self._state, self._params(new)
        state.begin([Request(row, params, 0, i, length + new) for i, row in enumerate(prompts.unbind())])
        self._executor.prefill(state)
        if new > 1:
            self._executor.decode(state, new - 1)
        return state.tokens[:batch, length : length + new]


class OnTorch(_OnExecutor):
    """The torch executor: the readable model with a KV cache."""

    title = "warpline torch executor"
    executor = "torch"


class OnTorchCompiled(OnTorch):
    """The same under torch.compile."""

    title = "warpline torch executor, torch.compile"
    warm_up = 1
    startup_seconds = COMPILE_SECONDS

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        assert isinstance(self._executor, TorchExecutor)
        self._executor.model = torch.compile(self._executor.model, dynamic=True)  # type: ignore[assignment]


class OnCpu(_OnExecutor):
    """The cpu executor: a team of threads decodes many tokens in one call."""

    title = "warpline cpu executor"
    executor = "cpu"
    devices = ("cpu",)
    startup_seconds = 3.0


class OnCpuInt8(OnCpu):
    """The same with int8 weights. Not what the others compute, so its tokens may differ; the row says how many do."""

    title = "warpline cpu executor, int8 weights"
    exact = False
    stored = "int8"

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        is_plain = weights.tensors["wte.weight"].dtype != torch.int8
        super().__init__(quantised(weights) if is_plain else weights, replace(case, dtype=self.stored), device)


class OnKernels(_OnExecutor):
    """The kernels executor: one launch per op."""

    title = "warpline kernels executor"
    executor = "kernels"
    devices = ("cuda",)
    startup_seconds = 3.0


class OnGraph(OnKernels):
    """The graph executor: one graph launch per token."""

    warm_up = 3  # a prompt of some length is captured when it comes for the second time
    title = "warpline graph executor"
    executor = "graph"


class OnPersistent(_OnExecutor):
    """The persistent executor: one launch decodes many tokens."""

    title = "warpline persistent executor"
    executor = "persistent"
    devices = ("cuda",)
    startup_seconds = 3.0
