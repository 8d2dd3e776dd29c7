"""Token ids in, token ids out, on the engine: what `generate` of a patched model runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from warpline.engine import executors
from warpline.engine.engine import Engine
from warpline.engine.job import Job
from warpline.engine.prefix import share_prefixes
from warpline.engine.request import Request
from warpline.hf.gate import DTYPES
from warpline.hf.weights import Taken, Watch, take, walk
from warpline.model.weights import explained_memory

#: Sequences that are computed together; more wait.
MOST_SEQUENCES = 64


class Runner:
    """An engine over a model's weights, kept for the next call. Its work follows what torch does on its own stream,
    where the model's parameters may be changed."""

    def __init__(self, model: Any, eos: int | None):
        some = model.transformer.wte.weight
        self.device, self.dtype, self.eos = some.device, DTYPES[some.dtype], eos
        views = take(model, copy=False, eos=eos)
        name = executors.resolve("auto", self.device, views.weights.config, self.dtype)
        on_torch = name == "torch"
        with explained_memory("a second copy of the model's matrices"):
            self.taken: Taken = views if on_torch else take(model, copy=True, eos=eos)
            self.executor = executors.create(name, self.taken.weights, self.device, self.dtype)
        self._watch = Watch(walk(model))
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    @property
    def described(self) -> str:
        """Which executor computes, and whose memory the weights are."""
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
        jobs, fits = [Job(request) for request in requests], [True]
        share_prefixes(jobs)
        with self._lock:  # an engine that is too small is not replaced between the two
            engine = self._fitting(requests)
            engine.submit(jobs)

        def look() -> None:
            if len(fits) == 1:  # once is enough
                fits.append(still())

        try:
            engine.run(lambda: not fits[-1] or all(job.finished for job in jobs), look)
        finally:
            engine.cancel(jobs)
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [job.tokens for job in jobs] if fits[-1] else None

    def _fitting(self, requests: Sequence[Request]) -> Engine:
        """The engine, with as many slots as a call has needed so far and whole contexts."""
        count = min(MOST_SEQUENCES, len(requests))
        if self._engine is None or self._engine.count < min(count, self.executor.most_lanes or count):
            if self._engine is not None:
                self._engine.close()  # before the new one is allocated
            positions = self.taken.weights.config.n_positions + 1
            self._engine = Engine(self.executor, count, positions, model="the model", own_stream=False)
        return self._engine
