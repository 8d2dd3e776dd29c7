"""Records generations of a method: by torch.profiler, or by CUDA events where CUPTI does not answer."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from warpline.bench.methods.base import Method
from warpline.errors import ConfigError
from warpline.profile.events import Event
from warpline.profile.instruments import Mark, Span, watched
from warpline.profile.session import ModulePath

_PREFIX, _MARK, _END = "warpline|", "warpline mark", "warpline mark end"
#: Host calls that give work to the GPU.
_DRIVER = tuple(f"{api}{call}" for api in ("cu", "cuda") for call in ("Launch", "GraphLaunch", "Memcpy", "Memset"))
#: Names that torch.compile and the recorder give to their own work: these are no operators, their time is dispatch.
_BOOKS = ("## Call Compiled", "Torch-Compiled Region", "TorchDynamo", "AOTDispatcher", "Pregraph", "Activity Buffer")


class CuptiMissingError(ConfigError):
    """torch.profiler reports no kernels of the GPU."""


#: Records `calls` generations of `new` tokens and returns the events.
Recording = Callable[[Method, Any, int, int], list[Event]]


def _run(method: Method, given: Any, new: int, calls: int, mark: Mark, end: Mark, span: Span) -> None:
    """Run `calls` generations and mark their steps. The prompt's step begins with the generation, including all
    preparation, so the method's own first mark is left out."""
    begun = False

    def step() -> None:
        nonlocal begun
        if begun:
            mark()
        begun = True

    with watched(method, step, span):
        for _ in range(calls):
            begun = False
            mark()
            method.generate(given, new)
            if method.device.type == "cuda":
                torch.cuda.synchronize(method.device)
            end()


def by_kineto(method: Method, given: Any, new: int, calls: int) -> list[Event]:
    """Record with torch.profiler: operators of the host, and kernels of a GPU."""
    on_gpu = method.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def mark(name: str) -> None:
        with record_function(name):
            pass

    def span(path: ModulePath) -> AbstractContextManager[object]:
        return record_function(_PREFIX + "/".join(path))

    recorder = profile(activities=activities, acc_events=False)
    with _hushed():
        recorder.start()
    try:
        _run(method, given, new, calls, lambda: mark(_MARK), lambda: mark(_END), span)
    finally:
        with _hushed():
            recorder.stop()
    results: Any = recorder.profiler
    events = convert(results.kineto_results.events())
    if on_gpu and not any(event.kind == "kernel" for event in events):
        raise CuptiMissingError("torch.profiler sees nothing of this GPU (CUPTI is missing, or in use elsewhere)")
    return events


def convert(raw: Sequence[Any]) -> list[Event]:
    """Convert Kineto's events to ours, in µs from the first mark. Kineto counts nanoseconds since 1970, and a float
    resolves only 256 of them: the difference is taken first. User spans have copies on the GPU's track, which are no
    kernels; operators of other threads are not ours."""
    found: list[Event] = []
    first = next((event for event in raw if event.name() == _MARK and not _is_device(event)), None)
    if first is None:
        return found
    thread, base = first.start_thread_id(), first.start_ns()
    for event in raw:
        name, start, us = event.name(), (event.start_ns() - base) / 1e3, event.duration_ns() / 1e3
        ours = name.startswith((_PREFIX, _MARK, _END))
        if _is_device(event):
            if not ours and not event.is_user_annotation():
                found.append(Event("kernel", name, start, us, event.correlation_id()))
        elif name == _END:
            found.append(Event("end", name, start))
        elif name == _MARK:
            found.append(Event("mark", name, start))
        elif ours:
            found.append(Event("span", name, start, us, path=tuple(name.removeprefix(_PREFIX).split("/"))))
        elif name.startswith(_DRIVER):
            found.append(Event("launch", name, start, us, event.correlation_id()))
        elif event.start_thread_id() == thread and not name.startswith(("cuda", "cu", *_BOOKS)):
            found.append(Event("op", name, start, us))
    return found


def _is_device(event: Any) -> bool:
    return str(event.device_type()).endswith("CUDA")


def by_events(method: Method, given: Any, new: int, calls: int) -> list[Event]:
    """Record without CUPTI: a CUDA event before and after every module, as if the module were one kernel."""
    taken: list[tuple[str, ModulePath, Any, Any]] = []

    def recorded() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def noted(kind: str) -> Mark:
        def note() -> None:
            taken.append((kind, (), recorded(), None))

        return note

    @contextmanager
    def span(path: ModulePath) -> Iterator[None]:
        begin = recorded()
        yield
        taken.append(("kernel", path, begin, recorded()))

    base = recorded()
    _run(method, given, new, calls, noted("mark"), noted("end"), span)
    torch.cuda.synchronize(method.device)
    return timed_spans([
        (kind, path, 1e3 * base.elapsed_time(a), 1e3 * base.elapsed_time(b or a)) for kind, path, a, b in taken
    ])  # fmt: skip


def timed_spans(taken: list[tuple[str, ModulePath, float, float]]) -> list[Event]:
    """Return modules as kernels, leaving out those that contain others; a step without modules is one kernel."""
    edges = [Event(kind, "step", start) for kind, _, start, _ in taken if kind != "kernel"]
    kernels = sorted((a, b, path) for kind, path, a, b in taken if kind == "kernel")
    inner = {path[:i] for _, _, path in kernels for i in range(len(path))}
    found = [Event("kernel", "[module]", a, b - a, path=path) for a, b, path in kernels if path not in inner]
    for begin, until in itertools.pairwise(edges):
        if begin.kind == "mark" and not any(begin.start <= kernel.start < until.start for kernel in found):
            found.append(Event("kernel", "[step]", begin.start, until.start - begin.start, path=("[step]",)))
    return edges + found


@contextmanager
def _hushed() -> Iterator[None]:
    """Redirect standard error, where Kineto announces its start and stop whatever the log level; also ignore a warning
    of some torch versions about events lost between cycles, because there is only one cycle."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
