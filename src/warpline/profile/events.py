"""Turns recorded events into the rows of a phase: every moment of a step belongs to one module, every kernel to the
module that launched it. Needs no torch, and treats recorded and synthetic events alike.

On a GPU a step lasts from the end of the last kernel of the step before to the end of its own last kernel; the first of
a generation begins when the host begins it, so what lies between two generations belongs to none. The time before a
kernel in which nothing ran is a gap, and belongs to the module that the GPU waited for. On a CPU a step is what the
host does from its mark to the next, or to the generation's end; what no operator accounts for is a gap: Python, and the
dispatch of operators.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warpline.errors import ConfigError
from warpline.profile.classify import classify
from warpline.profile.names import common
from warpline.profile.session import KernelRow, Launches, ModulePath, Moment, SpanRow

#: Steps shown on the timeline, and the most moments it has.
TRACE_STEPS, MOST_MOMENTS = 2, 4000
#: µs below which a host operator is left out of the timeline: mostly views.
SHORTEST = 5.0
#: torch's fused attention operators: inside attention, each counts as a step of its own.
FUSED_OPS = ("aten::scaled_dot_product_attention",)
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class Event:
    """Something with a begin and a duration in µs. `kind` is "mark" (a step begins), "end" (a generation is over, on
    the GPU too), "span" (a module; its name is the path), "op" (an operator on the host), "launch" (a call that gives
    the GPU work) or "kernel" (on the GPU)."""

    kind: str
    name: str
    start: float
    us: float = 0.0
    correlation: int = 0
    path: ModulePath = ()

    @property
    def end(self) -> float:
        """When it ended, in µs."""
        return self.start + self.us


#: Maps the names of a step's kernels, in order, to the module of each; None where it cannot tell.
Sequencer = Callable[[Sequence[str]], "list[ModulePath | None]"]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The rows of a phase, made from its events."""

    steps: tuple[float, ...]  # µs of each
    spans: tuple[SpanRow, ...]
    kernels: tuple[KernelRow, ...]
    launches: Launches
    timeline: tuple[Moment, ...]
    unplaced: int  # kernels, of all steps, whose module is unknown


@dataclass(frozen=True, slots=True)
class _Segment:
    start: float
    path: ModulePath


@dataclass(slots=True)
class _Sums:
    busy: float = 0.0
    gap: float = 0.0
    calls: int = 0


def aggregate(
    events: Sequence[Event], *, expected: int, skip: int = 0, on_gpu: bool, sequencer: Sequencer | None = None
) -> Aggregate:
    """Return the rows of the steps that begin at marks, without the first `skip`. Raise unless there are `expected`
    steps: times divided by another number would be wrong and look right."""
    steps = _Steps(events)
    if steps.count != expected:
        raise ConfigError(
            f"{steps.count} steps were seen where {expected} were taken: this method does not begin each step where it "
            "is watched, and its times cannot be divided"
        )
    if steps.count <= skip:
        raise ConfigError("no step was recorded: a profile needs at least one")
    host = _Host(events, steps.edges)
    if on_gpu:
        return _of_gpu(events, host, steps, skip, sequencer)
    return _of_cpu(events, host, steps, skip, sequencer)


class _Steps:
    """The host's steps: each lasts from its mark to the next mark, or to the end of its generation."""

    def __init__(self, events: Sequence[Event]):
        found = sorted((e.start, e.kind) for e in events if e.kind in ("mark", "end"))
        if found and found[-1][1] != "end":
            raise ConfigError("the last generation did not end while it was recorded")
        self.edges = [at for at, _ in found]
        self._numbers: list[int | None] = []  # of the step that begins at each edge
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.first: list[bool] = []  # whether a generation begins with it
        inside = False
        for at, kind in found:
            if inside:
                self.ends.append(at)
            self._numbers.append(self.count if kind == "mark" else None)
            if kind == "mark":
                self.begins.append(at)
                self.first.append(not inside)
            inside = kind == "mark"

    @property
    def count(self) -> int:
        return len(self.begins)

    def at(self, time: float) -> int | None:
        """Return the number of the step at this time; None between two generations."""
        edge = bisect.bisect_right(self.edges, time) - 1
        return self._numbers[edge] if edge >= 0 else None

    def counts(self, time: float, skip: int) -> bool:
        """Whether this time lies in a step that is counted."""
        step = self.at(time)
        return step is not None and step >= skip


class _Host:
    """The module in which the host was at any time."""

    def __init__(self, events: Sequence[Event], bounds: Sequence[float]):
        spans = [event for event in events if event.kind == "span"]
        self.spans = spans
        self._set(_segments(spans, bounds))
        inside = [
            e for e in events if e.kind == "op" and e.name in FUSED_OPS and self.at(e.start)[-1:] == ("attention",)
        ]
        if inside:
            found = [Event("span", e.name, e.start, e.us, path=(*self.at(e.start), "fused attention")) for e in inside]
            self.spans = spans + found
            self._set(_segments(self.spans, bounds))

    def _set(self, segments: list[_Segment]) -> None:
        self.segments = segments
        self._starts = [segment.start for segment in segments]

    def at(self, time: float) -> ModulePath:
        index = bisect.bisect_right(self._starts, time) - 1
        return self.segments[index].path if index >= 0 else ()


def _segments(spans: Sequence[Event], bounds: Sequence[float]) -> list[_Segment]:
    """Return every moment's module. Between two spans it is their common ancestor, at the edge of a step ()."""
    edges: list[tuple[float, int, ModulePath]] = [(at, 1, ()) for at in bounds]
    for span in spans:
        edges += [(span.start, 2, span.path), (span.end, 0, span.path)]
    edges.sort(key=lambda edge: (edge[0], edge[1], len(edge[2]) * (1 if edge[1] == 2 else -1)))
    found: list[_Segment] = []
    open_spans: list[ModulePath] = []
    last: ModulePath = ()
    waiting: int | None = None  # the segment after a span; its module is known when the next span begins
    for at, kind, path in edges:
        if kind == 1:
            waiting, last, open_spans = None, (), []
            found.append(_Segment(at, ()))
        elif kind == 2:
            if waiting is not None:
                found[waiting] = _Segment(found[waiting].start, common(last, path))
                waiting = None
            open_spans.append(path)
            found.append(_Segment(at, path))
        elif open_spans:
            open_spans.pop()
            last = path
            found.append(_Segment(at, open_spans[-1] if open_spans else ()))
            waiting = None if open_spans else len(found) - 1
    return found


def _of_cpu(events: Sequence[Event], host: _Host, steps: _Steps, skip: int, sequencer: Sequencer | None) -> Aggregate:
    count = steps.count - skip
    ops = [event for event in events if event.kind == "op" and steps.counts(event.start, skip)]
    own = _self_times(ops)
    sums: dict[ModulePath, _Sums] = defaultdict(_Sums)
    for segment, following in itertools.pairwise(host.segments):  # the last edge is an end
        if steps.counts(segment.start, skip):
            sums[segment.path].gap += following.start - segment.start
    for span in host.spans:
        if steps.counts(span.start, skip):
            sums[span.path].calls += 1
    table: dict[tuple[str, ModulePath], _Sums] = defaultdict(_Sums)
    places = _op_places(ops, host, steps, sequencer)
    for op, us, place in zip(ops, own, places, strict=True):
        path = () if place is None else place
        sums[path].busy += us
        sums[host.at(op.start)].gap -= us
        entry = table[op.name, path]
        entry.busy += us
        entry.gap += op.us
        entry.calls += 1
    for entry in sums.values():  # clocks are read slightly apart, so a gap can seem negative
        if entry.gap < 0:
            entry.busy, entry.gap = entry.busy + entry.gap, 0.0
    lasted = [(begin, end - begin) for begin, end in zip(steps.begins, steps.ends, strict=True)][skip:]
    return Aggregate(
        steps=tuple(us for _, us in lasted),
        spans=_rows(sums, count),
        kernels=_kernel_rows(table, count),
        launches=Launches(kernels=len(ops) / count),
        timeline=_timeline(host, [[] for _ in lasted], ops, lasted, steps, skip),
        unplaced=sum(place is None for place in places),
    )


def _op_places(
    ops: Sequence[Event], host: _Host, steps: _Steps, sequencer: Sequencer | None
) -> list[ModulePath | None]:
    """Return the module of each operator: where the host was, or for compiled code by its position in the step. Only
    outermost operators of a known class are placed so; operators inside share the module, those around are the
    step's."""
    if sequencer is None:
        return [host.at(op.start) for op in ops]
    found: list[ModulePath | None] = [()] * len(ops)
    outer: dict[int, int] = {}  # for each placed operator and those inside: the placed one
    by_step: dict[int | None, list[int]] = defaultdict(list)
    last: int | None = None
    for i in sorted(range(len(ops)), key=lambda i: (ops[i].start, -ops[i].us)):
        if last is not None and ops[i].end <= ops[last].end:
            outer[i] = last
        elif classify(ops[i].name) != "other":
            last = outer[i] = i
            by_step[steps.at(ops[i].start)].append(i)
    for own in by_step.values():
        for i, place in zip(own, sequencer([ops[i].name for i in own]), strict=True):
            found[i] = place
    for i, whole in outer.items():
        found[i] = found[whole]
    return found


def _self_times(ops: Sequence[Event]) -> list[float]:
    """Return the time of each operator without the operators it calls."""
    own = [op.us for op in ops]
    stack: list[int] = []
    for i in sorted(range(len(ops)), key=lambda i: (ops[i].start, -ops[i].us)):
        while stack and ops[stack[-1]].end <= ops[i].start:
            stack.pop()
        if stack:
            own[stack[-1]] -= ops[i].us
        stack.append(i)
    return [max(0.0, us) for us in own]


def _of_gpu(events: Sequence[Event], host: _Host, steps: _Steps, skip: int, sequencer: Sequencer | None) -> Aggregate:
    launches = {e.correlation: e for e in events if e.kind == "launch"}
    by_step = _by_step(events, launches, steps)
    if not all(by_step[skip:]):
        raise ConfigError("a step was recorded in which the GPU did nothing: CUPTI may be in use by another tool")
    sums: dict[ModulePath, _Sums] = defaultdict(_Sums)
    table: dict[tuple[str, ModulePath], _Sums] = defaultdict(_Sums)
    lasted: list[tuple[float, float]] = []
    moments: list[list[Moment]] = []
    unplaced = 0
    busy_until = steps.begins[0]
    for index, own in enumerate(by_step):
        if steps.first[index]:
            busy_until = max(busy_until, steps.begins[index])
        begun = busy_until
        drawn: list[Moment] = []
        for kernel, place in zip(own, _places(own, host, launches, sequencer), strict=True):
            path = () if place is None else place
            gap = max(0.0, kernel.start - busy_until)
            alone = max(0.0, kernel.end - max(busy_until, kernel.start))
            busy_until = max(busy_until, kernel.end)
            if index < skip:
                continue
            unplaced += place is None
            entry, row = sums[path], table[kernel.name, path]
            entry.busy, entry.gap, entry.calls = entry.busy + alone, entry.gap + gap, entry.calls + 1
            row.busy, row.gap, row.calls = row.busy + alone, row.gap + kernel.us, row.calls + 1
            drawn.append(Moment("gpu", kernel.name, path, kernel.start, kernel.us))
        if index >= skip:
            lasted.append((begun, busy_until - begun))
            moments.append(drawn)
    count = len(lasted)
    counted = [e for e in launches.values() if steps.counts(e.start, skip)]
    return Aggregate(
        steps=tuple(us for _, us in lasted),
        spans=_rows(sums, count),
        kernels=_kernel_rows(table, count),
        launches=Launches(
            count=len(counted) / count,
            host_us=sum(e.us for e in counted) / count,
            graphs=sum(e.name.startswith(GRAPH_LAUNCHES) for e in counted) / count,
            kernels=sum(map(len, by_step[skip:])) / count,
        ),
        timeline=_timeline(host, moments, counted, lasted, steps, skip),
        unplaced=unplaced,
    )


def _by_step(events: Sequence[Event], launches: dict[int, Event], steps: _Steps) -> list[list[Event]]:
    """Return the kernels of each step, in the order in which they ran. A kernel belongs to the step in which the host
    launched it, however late it ran; without a recorded launch, to the step of the kernel before it. If no launches
    were recorded at all, marks are on the GPU's clock."""
    found: list[list[Event]] = [[] for _ in range(steps.count)]
    step: int | None = None
    for kernel in sorted((e for e in events if e.kind == "kernel"), key=lambda e: e.start):
        launch = launches.get(kernel.correlation)
        if launch is not None:
            step = steps.at(launch.start)
        elif not launches:
            step = steps.at(kernel.start)
        if step is not None:
            found[step].append(kernel)
    return found


def _places(
    kernels: Sequence[Event], host: _Host, launches: dict[int, Event], sequencer: Sequencer | None
) -> list[ModulePath | None]:
    """Return each kernel's module: its own path, else by the sequencer, else where the host was at its launch."""
    if all(kernel.path for kernel in kernels):
        return [kernel.path for kernel in kernels]
    if sequencer is not None:
        return sequencer([kernel.name for kernel in kernels])
    found: list[ModulePath | None] = []
    for kernel in kernels:
        launch = launches.get(kernel.correlation)
        if launch is None or launch.name.startswith(GRAPH_LAUNCHES):
            found.append(None)
        else:
            found.append(host.at(launch.start))
    return found


def _rows(sums: dict[ModulePath, _Sums], count: int) -> tuple[SpanRow, ...]:
    ordered = sums.items()  # in the order in which modules were first met
    return tuple(
        SpanRow(path, s.busy / count, s.gap / count, s.calls / count) for path, s in ordered if s.busy or s.gap
    )


def _kernel_rows(table: dict[tuple[str, ModulePath], _Sums], count: int) -> tuple[KernelRow, ...]:
    rows = [KernelRow(name, path, s.calls / count, s.busy / count, s.gap / count) for (name, path), s in table.items()]
    return tuple(sorted(rows, key=lambda row: -row.us))


def _timeline(
    host: _Host,
    gpu: Sequence[Sequence[Moment]],
    calls: Sequence[Event],
    lasted: Sequence[tuple[float, float]],
    steps: _Steps,
    skip: int,
) -> tuple[Moment, ...]:
    """Return the moments of the first counted steps, from zero on: the host's work for them and the GPU's, which may
    come long after. As many whole steps as there is room for; of a longer first step, its beginning."""
    found: list[Moment] = []
    for index, own in enumerate(gpu[:TRACE_STEPS]):
        begin, us = lasted[index]
        more = [Moment("step", f"step {index + 1}", (), begin, us), *own]
        at = skip + index
        more += [Moment("module", s.path[-1], s.path, s.start, s.us) for s in host.spans if steps.at(s.start) == at]
        shown = (e for e in calls if steps.at(e.start) == at and (e.us >= SHORTEST or e.kind == "launch"))
        more += [Moment("host", e.name, host.at(e.start), e.start, e.us) for e in shown]
        if found and len(found) + len(more) > MOST_MOMENTS:
            break
        found += more
    found.sort(key=lambda moment: (moment.start, -moment.us))
    first = min(steps.begins[skip], lasted[0][0])
    return tuple(Moment(m.track, m.name, m.path, m.start - first, m.us) for m in found[:MOST_MOMENTS])
