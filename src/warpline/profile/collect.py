"""Makes a `Session`: runs a method, records its phases, and gives their times to the modules of the model."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

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
from warpline.profile import recorders, stamps
from warpline.profile.events import Aggregate, aggregate
from warpline.profile.instruments import naming_loops, reason_against, sequencer_of
from warpline.profile.session import PHASES, Launches, Phase, Session, Work

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
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


def collect(
    request: ProfileRequest, tick: Callable[[float], None] = lambda _: None, bench: Bench | None = None
) -> Session:
    """Build the method, warm it up, time it unrecorded, then record it. A `bench` from an earlier call provides this
    machine's limits, and perhaps the weights."""
    kind, device, case = methods.find(request.method), torch.device(request.device), request.case
    bench = bench or Bench(Settings(request.device))
    if reason_against(kind) is None and (kind.stored == "int8") != (request.dtype == "int8"):
        raise ConfigError(f"{request.method} has no {request.dtype}: weights in int8 are those of {', '.join(INT8)}")
    for reason in (reason_against(kind), kind.obstacle(case, device), case.obstacle(read_config(case.model))):
        if reason is not None:
            raise ConfigError(f"{request.method} cannot be profiled here: {reason}")
    if not bench.origin:
        bench.prepare()
    limits = bench.limits(replace(case, dtype=request.dtype))
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
        recorder = _Recorder(method, given, request)
        phases = []
        for name in request.phases:
            phases.append(recorder.phase(name))
            tick(1)
        notes = tuple(dict.fromkeys(recorder.notes))
        del recorder
        if device.type == "cpu" and request.method not in CHOSEN:
            phases = _beside_ours(phases, weights, prompts, request, limits["read_gb_s"])
    finally:
        method.close()
        del method
        tidy()
    return Session(
        origin=bench.origin | {"clocks": hardware.clocks(request.device)},
        kind=device.type,
        method=request.method,
        title=kind.title,
        model=request.model,
        config=weights.config,
        dtype=request.dtype,
        batch=request.batch,
        context=request.context,
        read_gb_s=limits["read_gb_s"],
        product_tflop_s=limits["product_tflop_s"],
        phases=tuple(phases),
        notes=notes,
    )


def _beside_ours(
    phases: list[Phase], weights: Weights, prompts: Tensor, request: ProfileRequest, read_gb_s: float
) -> list[Phase]:
    """Return the phases with the cpu executor's times for the same steps; a time below what its bytes need is noise."""
    kind, case = methods.find("cpu"), request.case
    if kind.obstacle(case, prompts.device) is not None:
        return phases
    ours = kind(weights, case, prompts.device)
    given = ours.given(prompts)
    try:
        ours.generate(given, case.new)
        recorder = _Recorder(ours, given, request)
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
    request: ProfileRequest
    notes: list[str] = field(default_factory=list)

    @property
    def _device(self) -> torch.device:
        return self.method.device

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def phase(self, name: str) -> Phase:
        """Record a phase: by stamps where one launch decodes many tokens, by CUDA events where CUPTI is missing."""
        plain, steps = self._plain(name), self.request.steps
        if plain is None:
            self.notes.append(NOISE.format(name))
        if name == "decode" and (stamped := self.method.stamped(self.given, steps + 1, stamps.RUNS)) is not None:
            track = "gpu" if self._on_gpu else "host"
            return stamps.decode_phase(stamped, steps, plain, self._work(name), track=track)
        if name == "prefill" and (passes := self.method.stamped_prompts(self.given, stamps.RUNS)) is not None:
            return stamps.prefill_phase(passes, plain, self._work(name))
        source = "kineto"
        try:
            found = self._recorded(name, recorders.by_kineto)
        except recorders.CuptiMissingError as error:
            self.notes.append(f"{error}: modules are timed by events, kernels are not seen")
            logger.warning("%s: modules are timed by events, kernels are not seen", error)
            source, found = "events", self._recorded(name, recorders.by_events)
        if found.unplaced:
            share = found.unplaced / max(1.0, found.launches.kernels * len(found.steps))
            self.notes.append(
                f"{name}: {100 * share:.0f} % of the kernels or operators come from a graph, compiled code or a "
                "library of which no table exists; they are counted to the step itself"
            )
        elif self.method.by_order:
            self.notes.append("graphs and compiled code are assigned to modules by the order of their products")
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
            new = self.request.case.new
            calls.append(lambda: self.method.generate(self.given, new))
        found = [seconds for _, seconds in interleave({name: calls}, self._device, repetitions=PLAIN, budget_seconds=1)]
        if name == "prefill":
            return 1e6 * statistics.median(found)
        decode = Times(Sample(tuple(found[::2])), Sample(tuple(found[1::2]))).decode
        return None if decode is None else 1e6 * decode / (new - 1)

    def _work(self, name: str) -> Work:
        context = self.request.context
        if self.method.recomputes:  # the whole text for every token, and the logits of every position
            length = context if name == "prefill" else context + 1 + WARM_STEPS + self.request.steps // 2
            return Work(length, 0, length, naive=True)
        if name == "prefill":
            return Work(context, 0, 1, naive=False)
        return Work(1, context + WARM_STEPS + self.request.steps // 2, 1, naive=False)

    def _recorded(self, name: str, record: recorders.Recording) -> Aggregate:
        """Record a few prompts, or one generation of which the prompt and the first steps are skipped."""
        calls, new, skip = (1, self.request.case.new, 1 + WARM_STEPS) if name == "decode" else (1 + PROMPTS, 1, 1)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        events = record(self.method, self.given, new, calls)
        sequencer = sequencer_of(self.method, name)
        return aggregate(events, expected=calls * new, skip=skip, on_gpu=self._on_gpu, sequencer=sequencer)
