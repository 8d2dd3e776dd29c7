"""Token ids in, token ids out, on the engine: what `generate` of a patched model runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from warpline.engine import executor as executors
from warpline.engine.state import Request, State, room_for
from warpline.errors import ModelError
from warpline.hf.gate import DTYPES
from warpline.hf.weights import Taken, Watch, take, walk
from warpline.model.weights import explained_memory

#: Sequences that are computed together; more run in turns.
MOST_ROWS = 64


class Runner:
    """An executor over a model's weights, and a state that is kept for the next call."""

    def __init__(self, model: Any, eos: int | None):
        some = model.transformer.wte.weight
        self.device, self.dtype, self.eos = some.device, DTYPES[some.dtype], eos
        views = take(model, copy=False, eos=eos)
        name = executors.choose("auto", self.device, views.weights.config, self.dtype)
        on_torch = name == "torch"
        with explained_memory("a second copy of the model's matrices"):
            self.taken: Taken = views if on_torch else take(model, copy=True, eos=eos)
            self.executor = executors.create(name, self.taken.weights, self.device, self.dtype)
        self._watch = Watch(walk(model))
        self._state: State | None = None

    @property
    def described(self) -> str:
        """Who computes, and whose memory the weights are."""
        copied, shared = self.taken.copied_bytes, self.taken.shared_bytes
        text = f"the {self.executor.name} executor; {shared / 1e6:,.1f} MB of weights shared"
        if copied:
            text += f", {copied / 1e6:,.1f} MB copied because Conv1D stores matrices transposed"
        if self.executor.name in ("auto", "persistent"):
            text += "; the persistent kernel keeps them once more, in the order in which it reads them"
        return text

    def serves(self, modules: Sequence[nn.Module]) -> bool:
        """Whether it still computes with what the model consists of now."""
        return self._watch.holds(modules)

    def run(self, requests: Sequence[Request], still: Callable[[], bool] = lambda: True) -> list[list[int]] | None:
        """The new tokens of every request; None if they are worth nothing, which `still` may find out while the GPU
        is busy with them."""
        most = min(MOST_ROWS, self.executor.most_rows or MOST_ROWS)
        tokens: list[list[int]] = []
        for first in range(0, len(requests), most):
            found = self._run(requests[first : first + most], still)
            if found is None:
                return None
            tokens += found
        return tokens

    def _run(self, requests: Sequence[Request], still: Callable[[], bool]) -> list[list[int]] | None:
        state, executor = self._fitting(requests), self.executor
        state.begin(requests)
        shortest = min(len(request.prompt) for request in requests)
        executor.prefill(state)
        left = max(request.limit - len(request.prompt) for request in requests) - 1
        size = executor.at_once(state, max(left, 1))
        if left:
            executor.decode(state, size)
        if not still():
            return None
        for gone in range(size, left, size):
            if bool(state.done[: state.batch].all()):
                break
            executor.decode(state, min(size, left - gone))
        seen = state.read(shortest)
        executor.check()
        if seen.broken.any():
            raise ModelError(
                f"the model computed logits that are no numbers: its weights are damaged, or {self.dtype} overflowed"
            )
        lengths = [len(request.prompt) for request in requests]
        return [
            seen.tokens[row, length - shortest : int(seen.length[row]) - shortest].tolist()
            for row, length in enumerate(lengths)
        ]

    def _fitting(self, requests: Sequence[Request]) -> State:
        rows, capacity = len(requests), max(request.limit for request in requests)
        if self._state is None or not self._state.fits(rows, capacity):
            rows, capacity = room_for(self.taken.weights.config, rows, capacity, self._state)
            self._state = None  # before the new one is allocated
            with explained_memory(f"a KV cache of {rows} × {capacity} positions"), torch.inference_mode(False):
                self._state = self.executor.allocate(rows, capacity)
        return self._state
