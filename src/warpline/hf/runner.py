"""Token ids in, token ids out on the engine: `generate` of a patched model runs on this."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from warpline.config import EngineConfig
from warpline.engine import executors
from warpline.engine.engine import Engine
from warpline.engine.job import Job
from warpline.engine.prefix import share_prefixes
from warpline.engine.request import Request
from warpline.hf.gate import DTYPES
from warpline.hf.weights import Watch, in_codes, take, walk
from warpline.model.weights import explained_memory

#: Most sequences that are computed together; more wait.
MOST_SEQUENCES = 64


class Codes(NamedTuple):
    """What the engine keeps as int8 codes: its weights, keys and values, or nothing."""

    dtype: str | None = None
    kv_dtype: str | None = None


PLAIN = Codes()


class Runner:
    """An engine over a model's weights, kept for the next call. It works on torch's current stream, after any changes
    to the model's parameters that were enqueued there."""

    def __init__(self, model: Any, eos: int | None, codes: Codes = PLAIN):
        some = model.transformer.wte.weight
        self.device, self.dtype, self.eos = some.device, codes.dtype or DTYPES[some.dtype], eos
        views = take(model, copy=False, eos=eos)
        name = executors.resolve("auto", self.device, views.weights.config, self.dtype)
        with explained_memory("a second copy of the model's matrices"):
            if codes.dtype is not None:
                self.taken = in_codes(views)
            else:
                self.taken = views if name == "torch" else take(model, copy=True, eos=eos)
            asked = EngineConfig(kv_dtype=codes.kv_dtype)
            self.executor = executors.create(name, self.taken.weights, self.device, self.dtype, asked)
        self._watch = Watch(walk(model))
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    @property
    def described(self) -> str:
        """Name of the executor, and how much weight memory is shared with the model or copied."""
        copied, shared = self.taken.copied_bytes, self.taken.shared_bytes
        text = f"the {self.executor.name} executor; {shared / 1e6:,.1f} MB of weights shared"
        if copied:
            why = "as int8 codes" if self.dtype == "int8" else "because Conv1D stores matrices transposed"
            text += f", {copied / 1e6:,.1f} MB copied {why}"
        if self.executor.has_tape:
            text += "; the persistent kernel keeps them once more, in the order in which it reads them"
        return text

    def serves(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the weights are still those of the model."""
        return self._watch.holds(modules)

    def run(self, requests: Sequence[Request], still: Callable[[], bool] = lambda: True) -> list[list[int]] | None:
        """Return the new tokens of every request; None if `still`, called meanwhile, finds that the model has
        changed."""
        jobs, fits = [Job(request) for request in requests], [True]
        share_prefixes(jobs)
        with self._lock:  # so that no other call replaces the engine in between
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
        """Return the engine, with as many slots as any call has needed so far, each for a whole context."""
        count = min(MOST_SEQUENCES, len(requests))
        if self._engine is None or self._engine.count < min(count, self.executor.most_lanes or count):
            if self._engine is not None:
                self._engine.close()  # before the new one is allocated
            positions = self.taken.weights.config.n_positions + 1
            self._engine = Engine(self.executor, count, positions, model="the model", own_stream=False)
        return self._engine
