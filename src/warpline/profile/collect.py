"""Runs a method, records it, and makes a `Session` of the events. The only module of the profiler that records."""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from warpline import hardware
from warpline.bench import methods
from warpline.bench.figures import Times
from warpline.bench.methods.base import Method
from warpline.bench.methods.names import CHOSEN, INT8
from warpline.bench.protocol import Sample, interleave
from warpline.bench.run import Bench, tidy
from warpline.bench.workloads import Case, Settings
from warpline.errors import ConfigError
from warpline.model import cost
from warpline.model.weights import Weights, read_config
from warpline.profile import stamps
from warpline.profile.events import Aggregate, Event, aggregate
from warpline.profile.instruments import Mark, Span, naming_loops, reason_against, sequencer_of, watched
from warpline.profile.session import PHASES, Launches, ModulePath, Phase, Session, Work

logger = logging.getLogger(__name__)

#: Most steps to record: with more, the mean gets no better and the recorder's memory grows.
MOST_STEPS = 64
#: A session's note where noise made a step slower unrecorded than recorded, or its time negative.
NOISE = "{}: noise exceeds the time of an unrecorded step, so recorded steps count"
#: Decode steps that are recorded but not counted, before those that count.
WARM_STEPS = 2
#: Generations that are timed without a recorder, at most: fewer where they take long.
PLAIN = 15
#: Prompts that are recorded.
PROMPTS = 3
_PREFIX, _MARK, _END = "warpline|", "warpline mark", "warpline mark end"
#: Host calls that give work to the GPU.
_DRIVER = tuple(f"{api}{call}" for api in ("cu", "cuda") for call in ("Launch", "GraphLaunch", "Memcpy", "Memset"))

#: Names that torch.compile and the recorder give to their own work: these are no operators, their time is dispatch.
_BOOKS = ("## Call Compiled", "Torch-Compiled Region", "TorchDynamo", "AOTDispatcher", "Pregraph", "Activity Buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to profile."""

    method: str
    model: str
    dtype: str
    device: str
    batch: int = 1
    context: int = 128
    steps: int = 8
    phases: tuple[str, ...] = PHASES

    def __post_init__(self) -> None:
        for name in ("batch", "context", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.steps > MOST_STEPS:
            raise ConfigError(f"{self.steps} steps are more than a profile keeps: record up to {MOST_STEPS}")

    @property
    def label(self) -> str:
        """Method and dtype, as shown to users."""
        return f"{self.method}:{self.dtype}"

    @property
    def case(self) -> Case:
        """The benchmark case; methods with int8 weights quantise those of another dtype."""
        new = 1 + WARM_STEPS + self.steps
        return Case(
            workload="profile",
            kind="generate",
            model=self.model,
            dtype=("fp32" if self.device == "cpu" else "fp16") if self.dtype == "int8" else self.dtype,
            batch=self.batch,
            prompt=self.context,
            new=new,
        )


def collect(wish: Wish, tick: Callable[[float], None] = lambda _: None, bench: Bench | None = None) -> Session:
    """Build the method, warm it up, time it unrecorded, then record it. A `bench` from an earlier call provides this
    machine's limits, and perhaps the weights."""
    kind, device, case = methods.find(wish.method), torch.device(wish.device), wish.case
    bench = bench or Bench(Settings(wish.device))
    if reason_against(kind) is None and (kind.stored == "int8") != (wish.dtype == "int8"):
        raise ConfigError(f"{wish.method} has no {wish.dtype}: weights in int8 are those of {', '.join(INT8)}")
    for reason in (reason_against(kind), kind.obstacle(case, device), case.obstacle(read_config(case.model))):
        if reason is not None:
            raise ConfigError(f"{wish.method} cannot be profiled here: {reason}")
    if not bench.origin:
        bench.prepare()
    limits = bench.limits(replace(case, dtype=wish.dtype))
    tick(1)
    weights = bench.load(case)
    generator = torch.Generator().manual_seed(case.prompt)
    prompts = torch.randint(weights.config.vocab_size, (case.batch, case.prompt), generator=generator).to(device)
    method = kind(weights, case, device)
    given = method.given(prompts)
    try:
        with naming_loops(kind):  # code for a CPU is compiled at its first call
            for _ in range(1 + kind.warm_up):
                method.generate(given, case.new)
        tick(1)
        recorder = _Recorder(method, given, wish)
        phases = []
        for name in wish.phases:
            phases.append(recorder.phase(name))
            tick(1)
        notes = tuple(dict.fromkeys(recorder.notes))
        del recorder
        if device.type == "cpu" and wish.method not in CHOSEN:
            phases = _beside_ours(phases, weights, prompts, wish, limits["read_gb_s"])
    finally:
        method.close()
        del method
        tidy()
    return Session(
        origin=bench.origin | {"clocks": hardware.clocks(wish.device)},
        kind=device.type,
        method=wish.method,
        title=kind.title,
        model=wish.model,
        config=weights.config,
        dtype=wish.dtype,
        batch=wish.batch,
        context=wish.context,
        read_gb_s=limits["read_gb_s"],
        product_tflop_s=limits["product_tflop_s"],
        phases=tuple(phases),
        notes=notes,
    )


def _beside_ours(phases: list[Phase], weights: Weights, prompts: Tensor, wish: Wish, read_gb_s: float) -> list[Phase]:
    """Return the phases with the cpu executor's times for the same steps; a time below what its bytes need is noise."""
    kind, case = methods.find("cpu"), wish.case
    if kind.obstacle(case, prompts.device) is not None:
        return phases
    ours = kind(weights, case, prompts.device)
    given = ours.given(prompts)
    try:
        ours.generate(given, case.new)
        recorder = _Recorder(ours, given, wish)
        moved = cost.decode(weights.config, case.dtype, batch=case.batch, context=case.prompt, screened=True)
        least = cost.total_bytes(moved) / read_gb_s / 1e3
        times = [recorder._plain(phase.name) for phase in phases]
        return [
            replace(phase, cpu_us=us if us is not None and us > least else None)
            for phase, us in zip(phases, times, strict=True)
        ]
    finally:
        ours.close()


@dataclass(slots=True)
class _Recorder:
    method: Method
    given: Any  # prompts, in the form the method takes
    wish: Wish
    notes: list[str] = field(default_factory=list)

    @property
    def _device(self) -> torch.device:
        return self.method.device

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def phase(self, name: str) -> Phase:
        """Record a phase: by stamps where one launch decodes many tokens, by CUDA events where CUPTI is missing."""
        plain, steps = self._plain(name), self.wish.steps
        if plain is None:
            self.notes.append(NOISE.format(name))
        if name == "decode" and (stamped := self.method.stamped(self.given, steps + 1, stamps.RUNS)) is not None:
            track = "gpu" if self._on_gpu else "host"
            return stamps.decode_phase(stamped, steps, plain, self._work(name), track=track)
        if name == "prefill" and (passes := self.method.stamped_prompts(self.given, stamps.RUNS)) is not None:
            return stamps.prefill_phase(passes, plain, self._work(name))
        source = "kineto"
        try:
            found = self._recorded(name, _kineto)
        except CuptiMissingError as error:
            self.notes.append(f"{error}: modules are timed by events, kernels are not seen")
            logger.warning("%s: modules are timed by events, kernels are not seen", error)
            source, found = "events", self._recorded(name, _by_events)
        if found.unplaced:
            share = found.unplaced / max(1.0, found.launches.kernels * len(found.steps))
            self.notes.append(
                f"{name}: {100 * share:.0f} % of the kernels or operators come from a graph, compiled code or a "
                "library of which no table exists; they are counted to the step itself"
            )
        elif self.method.by_order:
            self.notes.append("graphs and compiled code are given to modules by the order of their products")
        mean = statistics.fmean(found.steps)
        if plain is not None and plain > 2 * mean:  # recording makes no step faster
            plain = None
            self.notes.append(NOISE.format(name))
        return Phase(
            name=name,
            source=source,
            steps=len(found.steps),
            step_us=mean,
            fastest_us=min(found.steps),
            slowest_us=max(found.steps),
            plain_us=mean if plain is None else plain,
            work=self._work(name),
            spans=found.spans,
            kernels=found.kernels if source == "kineto" else (),  # events see modules alone
            launches=found.launches if source == "kineto" else Launches(),
            timeline=found.timeline,
        )

    def _plain(self, name: str) -> float | None:
        """Return the µs of a step without a recorder, the median of a few; None where noise exceeds it."""
        calls = [lambda: self.method.generate(self.given, 1)]
        if name == "decode":
            new = self.wish.case.new
            calls.append(lambda: self.method.generate(self.given, new))
        found = [seconds for _, seconds in interleave({name: calls}, self._device, repetitions=PLAIN, budget_seconds=1)]
        if name == "prefill":
            return 1e6 * statistics.median(found)
        decode = Times(Sample(tuple(found[::2])), Sample(tuple(found[1::2]))).decode
        return None if decode is None else 1e6 * decode / (new - 1)

    def _work(self, name: str) -> Work:
        context = self.wish.context
        if self.method.recomputes:  # the whole text for every token, and the logits of every position
            length = context if name == "prefill" else context + 1 + WARM_STEPS + self.wish.steps // 2
            return Work(length, 0, length, naive=True)
        if name == "prefill":
            return Work(context, 0, 1, naive=False)
        return Work(1, context + WARM_STEPS + self.wish.steps // 2, 1, naive=False)

    def _recorded(self, name: str, record: Recording) -> Aggregate:
        """Record a few prompts, or one generation of which the prompt and the first steps are skipped."""
        calls, new, skip = (1, self.wish.case.new, 1 + WARM_STEPS) if name == "decode" else (1 + PROMPTS, 1, 1)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        events = record(self.method, self.given, new, calls)
        sequencer = sequencer_of(self.method, name)
        return aggregate(events, expected=calls * new, skip=skip, on_gpu=self._on_gpu, sequencer=sequencer)


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


def _kineto(method: Method, given: Any, new: int, calls: int) -> list[Event]:
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


def _by_events(method: Method, given: Any, new: int, calls: int) -> list[Event]:
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
