"""Our methods: the readable model, the executors, and `LLM` as a user calls it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from warpline.bench.methods.base import (
    COMPILE_SECONDS,
    Counts,
    InInt8,
    Method,
    Stamped,
    StampedPrompts,
    StampName,
    Watcher,
)
from warpline.bench.requests import Asked
from warpline.bench.workloads import Case
from warpline.config import EngineConfig, SamplingParams
from warpline.engine import executors
from warpline.engine.crossing import FAULT, NOT_FINITE
from warpline.engine.executors.pytorch import TorchExecutor
from warpline.engine.llm import LLM
from warpline.engine.request import Request, Span
from warpline.engine.slots import Slots
from warpline.engine.text import Completion
from warpline.model.gpt2 import GPT2
from warpline.model.observe import observed
from warpline.model.weights import Weights, read_config

if TYPE_CHECKING:
    from warpline.engine.executors.graph.schedule import OpCall


@functools.cache
def _greedy(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)


class FromHost(Method):
    """A method that begins and ends on the host by itself."""

    def given(self, prompts: Tensor) -> list[np.ndarray]:
        """Return the prompts as a list of id arrays on the host."""
        return list(prompts.cpu().numpy())

    ids = given

    def answer(self, ids: Any, new: int) -> Any:
        """Return the result of `generate`, which is already on the host."""
        return self.generate(ids, new)


class OnLLM(FromHost):
    """`LLM.generate` from lists of ids to texts, with the queue, the tokenizer and everything else in between."""

    title = "warpline (LLM.generate)"
    windows = True
    warm_up = 3  # it may choose the graph executor
    startup_seconds = 3.0
    serves = "together"
    unseen = "is an executor behind a queue of requests: profile that executor"

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        self._llm = LLM.of(weights, device, case.dtype, kv_dtype=self.kv_stored, window=case.window)

    @classmethod
    def start_compiling(cls, case: Case, device: torch.device) -> None:
        """Start compiling as `LLM` does."""
        config, dtype = read_config(case.model), cls.stored or case.dtype
        executors.start_compiling(executors.resolve("auto", device, config, dtype), config, device, dtype)

    def generate(self, prompts: Sequence[np.ndarray], new: int) -> list[Completion]:
        """Return completions with their texts, as a user gets them."""
        return self._llm.generate(list(prompts), _greedy(new))

    def tokens(self, answer: list[Completion]) -> Tensor:
        """Return the ids of the completions, which are what is judged."""
        return torch.tensor([completion.token_ids for completion in answer])

    def serve(self, asked: Sequence[Asked], batch: int) -> Iterator[list[list[int]]]:
        """Answer all requests in one call."""
        written = self._llm.generate([one.prompt for one in asked], [_greedy(one.new) for one in asked])
        yield [list(completion.token_ids) for completion in written]

    def counts(self) -> Counts:
        """Return the counters of the engine."""
        stats = self._llm.engine.stats
        return Counts(stats.steps, stats.lane_steps, stats.busy_seconds, stats.idle_seconds)

    def close(self) -> None:
        """Release the weights and close the engine, which holds slots."""
        super().close()
        self._llm.close()
        del self._llm


class OnLLMInt8(InInt8, OnLLM):
    """`LLM.generate` with int8 weights."""

    title = "warpline (LLM.generate), int8 weights"


class Naive(Method):
    """Runs the whole text through the model for every token, with textbook attention and no KV cache."""

    title = "naive PyTorch, no KV cache"
    windows = True
    recomputes = True

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        with torch.device("meta"):
            model = GPT2(case.windowed(weights.config), naive=True)
        model.load_state_dict(weights.tensors, assign=True)
        self.model: Any = model.requires_grad_(False).eval()

    @torch.inference_mode()
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Extend the text token by token."""
        text = prompts
        for _ in range(new):
            logits = self.model(text)[:, -1]  # of the last position; the model computes all of them
            text = torch.cat((text, logits.argmax(dim=-1, keepdim=True)), dim=1)
        return text[:, prompts.shape[1] :]

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Count every pass as a step; the model reports its parts unless it was compiled."""
        hook = self.model.register_forward_pre_hook(lambda *_: watcher.step())
        try:
            with _parts(self, watcher):
                yield
        finally:
            hook.remove()


class NaiveCompiled(Naive):
    """The naive model under torch.compile with dynamic shapes."""

    title = "naive PyTorch, torch.compile"
    compiled = by_order = True
    warm_up = 1
    startup_seconds = COMPILE_SECONDS

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        self.model = torch.compile(self.model, dynamic=True)


class OnExecutor(FromHost):
    """One of our executors, from ids on the host to ids on the host: without queue, tokenizer and stop texts."""

    executor: str
    windows = True

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        config = case.windowed(weights.config)
        used = weights if config == weights.config else replace(weights, config=config)
        asked = EngineConfig(kv_dtype=self.kv_stored)
        self._executor = executors.create(self.executor, used, device, case.dtype, asked)
        self._slots: Slots | None = None
        self._pass = 0  # index among the passes over the prompts of one generation

    @classmethod
    def start_compiling(cls, case: Case, device: torch.device) -> None:
        """Start compiling as `LLM` does."""
        executors.start_compiling(cls.executor, read_config(case.model), device, cls.stored or case.dtype)

    def generate(self, prompts: Sequence[np.ndarray], new: int) -> Tensor:
        """Admit the prompts to slots, which are reused by the next call, and return the tokens generated."""
        slots, lanes = self._prompted(prompts, new)
        try:
            if new > 1:
                self._executor.decode(slots, lanes, new - 1)
            news = slots.report(lanes, new).wait()
        finally:
            self._release(slots, lanes)
        if (news.flags & FAULT).any():
            slots.fault.zero_()
            raise self._executor.fault()
        if (news.flags & NOT_FINITE).any():
            raise RuntimeError("its logits are no numbers")
        return torch.from_numpy(news.tokens[:, :new].astype(np.int64))

    def _prompted(self, prompts: Sequence[np.ndarray], new: int) -> tuple[Slots, list[int]]:
        """Admit the prompts and compute the first token after each; return the slots and the lanes used."""
        if self._slots is None:
            self._slots = self._executor.allocate(self.case.batch, self.case.prompt + max(self.case.new, 1))
        slots, params = self._slots, _greedy(new)
        lanes = slots.admit([Request(row, params, 0, i, len(row) + new) for i, row in enumerate(prompts)])
        if new > 1:
            self._executor.compile_ahead(slots, lanes)
        for number, spans in enumerate(_passes(lanes, prompts, self._executor.prompt_tokens)):
            self._pass = number
            self._executor.prefill(slots, spans)
        return slots, lanes

    @staticmethod
    def _release(slots: Slots, lanes: Sequence[int]) -> None:
        for slot in lanes:
            slots.release(slot)

    def watch(self, watcher: Watcher) -> AbstractContextManager[object]:
        """Trace by the executor's own marks; all passes over the prompts of one generation are one step."""

        def mark(phase: str) -> None:
            if phase == "decode" or self._pass == 0:
                watcher.step()

        return self._executor.trace(mark)

    def table(self, phase: str) -> Sequence[OpCall] | None:
        """Return the executor's op table of this phase."""
        return self._executor.table(phase)

    def close(self) -> None:
        """Release the weights, the slots and what is bound to them."""
        super().close()
        self._slots = None
        del self._executor


class OnTorch(OnExecutor):
    """The torch executor: the readable model with a KV cache."""

    title = "warpline torch executor"
    executor = "torch"

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Trace as other executors; the model also reports its parts unless it was compiled."""
        with super().watch(watcher), _parts(self, watcher):
            yield


class OnTorchCompiled(OnTorch):
    """The torch executor under torch.compile."""

    title = "warpline torch executor, torch.compile"
    compiled = by_order = True
    warm_up = 1
    startup_seconds = COMPILE_SECONDS

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        assert isinstance(self._executor, TorchExecutor)
        self._executor.model = torch.compile(self._executor.model, dynamic=True)  # type: ignore[assignment]


class OnCpu(OnExecutor):
    """The cpu executor: a team of threads decodes many tokens in one call."""

    title = "warpline cpu executor"
    executor = "cpu"
    devices = ("cpu",)
    startup_seconds = 3.0

    def stamped(self, prompts: Sequence[np.ndarray], tokens: int, runs: int) -> Stamped:
        """Time each call by the host's clock."""
        from warpline.engine.executors.cpu.executor import CpuExecutor

        assert isinstance(self._executor, CpuExecutor)
        us = []
        for _ in range(1 + runs):  # the first one is the warm-up
            slots, lanes = self._prompted(prompts, 1 + tokens)
            with self._executor.stamped(slots, tokens) as calls:
                begun = time.perf_counter()
                self._executor.decode(slots, lanes, tokens)
                us.append(1e6 * (time.perf_counter() - begun) / tokens)
            screened = self._executor.screens(slots, lanes)
            self._release(slots, lanes)
        clocks, moments = calls[-1]
        return Stamped(us[1:], torch.from_numpy(clocks[:, 1:]), moments, screened)

    def stamped_prompts(self, prompts: Sequence[np.ndarray], runs: int) -> StampedPrompts:
        """Time passes from requests to their first tokens by the host's clock."""
        from warpline.engine.executors.cpu.executor import CpuExecutor

        assert isinstance(self._executor, CpuExecutor)
        self.generate(prompts, 1)
        assert self._slots is not None
        found = []
        for _ in range(runs):
            with self._executor.stamped(self._slots) as calls:
                begun = time.perf_counter()
                self.generate(prompts, 1)
                found.append((1e6 * (time.perf_counter() - begun), calls))
        _, median = sorted(found, key=lambda run: run[0])[runs // 2]
        slots, lanes = self._prompted(prompts, 1)
        screened = self._executor.screens(slots, lanes)
        self._release(slots, lanes)
        stamps = [(torch.from_numpy(clocks), names) for clocks, names in median]
        return StampedPrompts([us for us, _ in found], stamps, screened)


class OnCpuInt8(InInt8, OnCpu):
    """The cpu executor with int8 weights."""

    title = "warpline cpu executor, int8 weights"


class OnKernels(OnExecutor):
    """The kernels executor: one launch per op."""

    title = "warpline kernels executor"
    executor = "kernels"
    devices = ("cuda",)
    startup_seconds = 3.0


class OnGraph(OnKernels):
    """The graph executor: one graph launch per token."""

    warm_up = 3  # a prompt's length is captured when it comes for the second time
    title = "warpline graph executor"
    executor = "graph"


class OnGraphInt8(InInt8, OnGraph):
    """The graph executor with int8 weights."""

    title = "warpline graph executor, int8 weights"


class OnPersistent(OnExecutor):
    """The persistent executor: one launch decodes many tokens."""

    title = "warpline persistent executor"
    executor = "persistent"
    devices = ("cuda",)
    startup_seconds = 3.0

    def stamped(self, prompts: Sequence[np.ndarray], tokens: int, runs: int) -> Stamped:
        """Time each launch between two events of the GPU: the host's work in the meantime is not counted."""
        from warpline.engine.executors.persistent.executor import PersistentExecutor
        from warpline.kernels.persistent import LAYER_STAMPS, TOKEN_STAMPS

        assert isinstance(self._executor, PersistentExecutor)
        launches = []
        with self._executor.stamped(tokens) as clocks:
            for _ in range(1 + runs):  # the first one compiles
                slots, lanes = self._prompted(prompts, 1 + tokens)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self._executor.decode(slots, lanes, tokens)
                end.record()
                slots.report(lanes, 1 + tokens).wait()
                screened = self._executor.screens(slots, lanes)
                self._release(slots, lanes)
                launches.append((begin, end))
            seen = clocks.cpu()
        us = [1e3 * begin.elapsed_time(end) / tokens for begin, end in launches[1:]]
        layers: list[StampName] = [(m, layer) for layer in range(self.weights.config.n_layer) for m in LAYER_STAMPS]
        return Stamped(us, seen, layers + [(m, None) for m in TOKEN_STAMPS], screened)


class OnPersistentInt8(InInt8, OnPersistent):
    """The persistent executor with int8 weights."""

    title = "warpline persistent executor, int8 weights"


def _passes(lanes: Sequence[int], prompts: Sequence[np.ndarray], most: int) -> Iterator[list[Span]]:
    """Yield the prompts in order as spans, at most `most` tokens per pass."""
    spans: list[Span] = []
    left = most
    for slot, prompt in zip(lanes, prompts, strict=True):
        start = 0
        while start < len(prompt):
            end = min(len(prompt), start + left)
            spans.append(Span(slot, start, end, (slot,) if end == len(prompt) else ()))
            left -= end - start
            start = end
            if not left:
                yield spans
                spans, left = [], most
    if spans:
        yield spans


def _parts(method: Method, watcher: Watcher) -> AbstractContextManager[object]:
    """Report the parts of the readable model; compiled code reports none."""
    return ExitStack() if method.compiled else observed(watcher.part)
