"""The process that measures. A candidate may hang, crash or poison it; the sweep then starts another one.

A request names its case, so that a new process can continue where the old one stopped.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from warpline.errors import WarplineError
from warpline.kernels.arguments import Dims

#: Seconds for a process to start and make a case's inputs, to check a candidate, and to time a round of candidates.
OPENING, CHECKING, TIMING = 120.0, 20.0, 60.0

#: Kernel, dtype, dimensions, whether launches overlap.
Named = tuple[str, str, Dims, bool]
#: Median, 20th and 80th percentile of a launch in microseconds.
Times = tuple[float, float, float]


class Fault(Exception):
    """A measurement failed; the message says why."""


class Worker:
    """The parent's side of the process."""

    def __init__(self, serve: Callable[[Connection], None] | None = None, patience: float = 1.0):
        self._serve, self._patience = serve or serve_gpu, patience
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def open(self, case: Named) -> None:
        """Make a case's inputs and expected results."""
        self._ask("open", case, None, OPENING)

    def check(self, case: Named, tunables: dict[str, int]) -> None:
        """Launch a candidate and check its results; raise a `Fault` if they are wrong."""
        self._ask("check", case, tunables, CHECKING)

    def time(self, case: Named, candidates: Sequence[dict[str, int]]) -> list[Times]:
        """Time candidates in turn."""
        found: list[Times] = self._ask("time", case, list(candidates), TIMING)
        return found

    def stop(self) -> None:
        """Kill the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.join(OPENING)  # the driver may take long to end running kernels
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _ask(self, verb: str, case: Named, about: Any, seconds: float) -> Any:
        if self._connection is None:
            self._start()
            seconds += OPENING
        assert self._connection is not None
        seconds *= self._patience
        try:
            self._connection.send((verb, case, about))
            if not self._connection.poll(seconds):
                self.stop()
                raise Fault(f"no answer within {seconds:.0f} s")
            state, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.stop()
            raise Fault("the process died") from error
        if state == "poisoned":
            self.stop()
        if state != "ok":
            raise Fault(str(answer))
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def serve_gpu(connection: Connection) -> None:
    """Answer requests in the child process until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    bench = _Bench()
    while True:
        try:
            verb, case, about = connection.recv()
        except EOFError:
            return
        try:
            answer = ("ok", bench.do(verb, case, about))
        except WarplineError as error:
            answer = ("fault" if _is_sound() else "poisoned", str(error))
        except RuntimeError as error:  # from torch; after most CUDA errors nothing works in this process
            answer = ("poisoned", str(error).splitlines()[0])
        connection.send(answer)


def _is_sound() -> bool:
    """Whether the GPU still works in this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class _Bench:
    """The current case on the GPU."""

    def __init__(self) -> None:
        self._open: tuple[str, str, dict[str, int]] | None = None
        self._trial: Any = None
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def do(self, verb: str, case: Named, about: Any) -> Any:
        name, dtype, dims, overlapping = case
        if self._open != (name, dtype, dict(dims)):
            self._prepare(name, dtype, dims)
        if verb == "check":
            self._trial.check(tunables=about, overlapping=overlapping)
        return self._times(about, overlapping) if verb == "time" else None

    def _prepare(self, name: str, dtype: str, dims: Dims) -> None:
        import torch

        from warpline.bench.timing import rotating_sets
        from warpline.kernels import launch
        from warpline.kernels.catalog import find
        from warpline.kernels.verify import Trial, random_inputs

        self._open = self._trial = None
        self._inputs, self._outputs = [], []
        torch.cuda.empty_cache()
        spec = find(name)
        sets = range(rotating_sets(spec.bytes(dims, dtype)))
        self._trial = Trial(spec, dtype, dims, seed=1)
        self._inputs = [random_inputs(spec, dtype, dims, seed, full=True) for seed in sets]
        shapes = [(b.shape(dims), launch.TORCH_TYPES[b.element(dtype)]) for b in spec.outputs]
        self._outputs = [[torch.empty(shape, dtype=kind, device="cuda") for shape, kind in shapes] for _ in sets]
        self._open = name, dtype, dict(dims)

    def _times(self, candidates: Sequence[dict[str, int]], overlapping: bool) -> list[Times]:
        from warpline.bench.timing import time_in_turn
        from warpline.kernels import launch
        from warpline.kernels.verify import made_for

        spec, dims = self._trial.spec, self._trial.dims
        numbers = spec.number_values(dims)
        sets = list(enumerate(zip(self._inputs, self._outputs, strict=True)))

        def way(tunables: dict[str, int]) -> Callable[[int], None]:
            options = {"tunables": tunables, "numbers": numbers, "overlapping": overlapping}
            fitting = [(made_for(spec, i, tunables, dims, seed, full=True), o) for seed, (i, o) in sets]
            calls = [launch.Call(spec, i, outputs=o, **options) for i, o in fitting]
            return lambda i: calls[i].launch()

        found = time_in_turn([way(tunables) for tunables in candidates], len(sets))
        return [(timing.median, timing.p20, timing.p80) for timing in found]
