"""`Session`: the result of a profile, in one JSON file that can be opened again and compared. Needs no torch."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from warpline.bench.methods.names import INT8_KV
from warpline.config import ModelConfig
from warpline.errors import ConfigError, one_of
from warpline.model import cost

SCHEMA = 2
PHASES = ("prefill", "decode")
#: The sources of a module's times, by the name that a phase gives: what each can show and what not.
SOURCES = {
    "kineto": "torch.profiler: modules by spans, kernels and launches by their correlation",
    "events": "CUDA events around every module, because CUPTI is not available: no single kernels",
    "stamps": "clocks read by the blocks of a kernel or the threads of a CPU, scaled to the time of their launch",
}
#: Tracks of a timeline: on a GPU a step is when its kernels run, which may be long after the host launched them.
TRACKS = ("step", "module", "host", "gpu")

#: From the model down: ("h.3", "attention", "scores"); () is the step itself.
ModulePath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanRow:
    """Time of one module without its parts, in µs per step: computing, and waiting before that."""

    path: ModulePath
    busy_us: float
    gap_us: float
    calls: float = 1.0

    @property
    def us(self) -> float:
        """Computing and waiting together, in µs."""
        return self.busy_us + self.gap_us


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel, or on a CPU an operator, of one module. Times are per step; `us` counts no moment twice where kernels
    overlap, `duration_us` is the sum of durations from start to end."""

    name: str
    path: ModulePath
    calls: float
    us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class Launches:
    """The host's launches in one step."""

    count: float = 0.0  # launches of kernels, graphs and copies
    host_us: float = 0.0  # time inside these calls
    graphs: float = 0.0  # launches of whole graphs among them
    kernels: float = 0.0  # kernels that ran


@dataclass(frozen=True, slots=True)
class Moment:
    """Something on the timeline of one or a few steps, in µs from the begin of the first."""

    track: str
    name: str
    path: ModulePath
    start: float
    us: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: `cost.Workload` without the model."""

    new: int
    past: int
    logits: int
    naive: bool
    screened: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Prompt or decoding: means over the recorded steps."""

    name: str
    source: str
    steps: int
    step_us: float  # while it was recorded
    fastest_us: float
    slowest_us: float
    plain_us: float  # of a step that is not recorded
    cpu_us: float | None = None  # the same for the cpu executor, where that would be chosen instead
    work: Work
    spans: tuple[SpanRow, ...]
    kernels: tuple[KernelRow, ...] = ()
    launches: Launches = Launches()
    timeline: tuple[Moment, ...] = ()

    @property
    def busy_us(self) -> float:
        """Time in which something was computed."""
        return sum(row.busy_us for row in self.spans)

    @property
    def gap_us(self) -> float:
        """Time in which the device waited."""
        return sum(row.gap_us for row in self.spans)

    @property
    def free_us(self) -> float:
        """µs of a step without recording; noise can make the recorded step shorter, which then counts."""
        return min(self.step_us, self.plain_us)

    @property
    def free_busy_us(self) -> float:
        """Computing time of such a step: on a CPU recording makes operators longer too, but not beyond the step."""
        return min(self.busy_us, self.free_us)

    @property
    def slowdown(self) -> float:
        """How many times as long a step took because it was recorded."""
        return self.step_us / self.plain_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A method with a model on a machine, and where its time went."""

    origin: Mapping[str, Any]  # commit, versions, device, time
    kind: str  # "cpu" or "cuda"
    method: str
    title: str
    model: str
    config: ModelConfig
    dtype: str
    batch: int
    context: int
    read_gb_s: float
    product_tflop_s: float
    phases: tuple[Phase, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def label(self) -> str:
        """The session in one line, as shown to users."""
        return f"{self.method}, {self.model} {self.dtype}, batch {self.batch}, context {self.context}"

    @property
    def device(self) -> str:
        """The name of the device."""
        return str(self.origin.get("device", "unknown device"))

    def phase(self, name: str) -> Phase:
        """Return the phase called `name`; raise with the names there are if it is missing."""
        one_of(name, [phase.name for phase in self.phases], "phase")
        return next(phase for phase in self.phases if phase.name == name)

    def workload(self, phase: Phase, dtype: str | None = None) -> cost.Workload:
        """Return what a step of the phase computes, as input of the cost model."""
        work = phase.work
        return cost.Workload(
            config=self.config,
            dtype=dtype or self.dtype,
            kv_dtype="int8" if self.method in INT8_KV else None,
            batch=self.batch,
            new=work.new,
            past=work.past,
            logits=work.logits,
            naive=work.naive,
            screened=work.screened,
        )


# --- JSON -------------------------------------------------------------------------------------------------------------


def dumps(session: Session) -> str:
    """Return the JSON text: each name and path is stored once, and rows refer to it by its number."""
    words: dict[Any, int] = {}

    def word(value: str | ModulePath) -> int:
        return words.setdefault(value, len(words))

    phases = []
    for phase in session.phases:
        plain = {n: getattr(phase, n) for n in ("name", "source", "steps")}
        times = {n: _short(getattr(phase, n)) for n in ("step_us", "fastest_us", "slowest_us", "plain_us")}
        phases.append(
            plain
            | times
            | {
                "work": asdict(phase.work),
                **({} if phase.cpu_us is None else {"cpu_us": _short(phase.cpu_us)}),
                "launches": {name: _short(value) for name, value in asdict(phase.launches).items()},
                "spans": [[word(r.path), _short(r.busy_us), _short(r.gap_us), _short(r.calls)] for r in phase.spans],
                "kernels": [
                    [word(r.name), word(r.path), _short(r.calls), _short(r.us), _short(r.duration_us)]
                    for r in phase.kernels
                ],
                "timeline": [[TRACKS.index(m.track), word(m.name), word(m.path), *_rounded(m)] for m in phase.timeline],
            }
        )
    head = {n: getattr(session, n) for n in ("kind", "method", "title", "model", "dtype", "batch", "context")}
    limits = {n: getattr(session, n) for n in ("read_gb_s", "product_tflop_s")}
    whole = {"warpline_profile": SCHEMA, "origin": dict(session.origin), "config": asdict(session.config)} | head
    whole |= limits | {"notes": list(session.notes), "words": [w if isinstance(w, str) else list(w) for w in words]}
    return json.dumps(whole | {"phases": phases}, separators=(",", ":"))


def _rounded(moment: Moment) -> tuple[float, float]:
    """Return begin and duration rounded to 10 ns. The end is rounded too, so that nested moments stay nested."""
    start = round(moment.start, 2)
    return start, round(round(moment.start + moment.us, 2) - start, 2)


def _short(value: float) -> float:
    """Round to seven digits, more than any clock resolves."""
    return float(f"{value:.7g}")


def loads(text: str, source: str = "the text") -> Session:
    """Parse a session from its file's text; any defect raises a ConfigError that names `source`."""
    foreign = f"{source} holds no profile: give a file that 'warpline profile --save' or '--session' wrote"
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is no whole JSON file ({error}): was it cut short?") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("warpline_profile"), int):
        raise ConfigError(foreign)
    if (schema := raw["warpline_profile"]) > SCHEMA:
        raise ConfigError(f"{source} was written by a newer warpline (schema {schema}, known {SCHEMA}): update")
    if schema < SCHEMA:
        raise ConfigError(
            f"{source} was written by an older warpline (schema {schema}, now {SCHEMA}), which counted steps "
            "otherwise: record it again"
        )
    try:
        session = _session(raw)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{foreign} ({type(error).__name__}: {error})") from error
    if not session.phases:
        raise ConfigError(f"{source} has no phase: nothing was recorded")
    return session


def _session(raw: dict[str, Any]) -> Session:
    words: list[Any] = [tuple(w) if isinstance(w, list) else str(w) for w in raw["words"]]
    phases = tuple(_phase(one, words) for one in raw["phases"])
    return Session(
        origin=dict(raw["origin"]),
        kind=one_of(raw["kind"], ("cpu", "cuda"), "kind of device"),
        method=str(raw["method"]),
        title=str(raw["title"]),
        model=str(raw["model"]),
        config=ModelConfig(**raw["config"]),
        dtype=str(raw["dtype"]),
        batch=int(raw["batch"]),
        context=int(raw["context"]),
        read_gb_s=_positive(raw["read_gb_s"]),
        product_tflop_s=_positive(raw["product_tflop_s"]),
        phases=phases,
        notes=tuple(str(note) for note in raw["notes"]),
    )


def _phase(raw: dict[str, Any], words: list[Any]) -> Phase:
    timeline = (Moment(TRACKS[t], words[n], words[p], float(s), float(d)) for t, n, p, s, d in raw["timeline"])
    return Phase(
        name=one_of(raw["name"], PHASES, "phase"),
        source=one_of(raw["source"], SOURCES, "source"),
        steps=int(raw["steps"]),
        step_us=_positive(raw["step_us"]),
        fastest_us=_positive(raw["fastest_us"]),
        slowest_us=_positive(raw["slowest_us"]),
        plain_us=_positive(raw["plain_us"]),
        cpu_us=_positive(raw["cpu_us"]) if "cpu_us" in raw else None,
        work=Work(**raw["work"]),
        spans=tuple(SpanRow(words[p], float(b), float(g), float(c)) for p, b, g, c in raw["spans"]),
        kernels=tuple(KernelRow(words[n], words[p], float(c), float(u), float(d)) for n, p, c, u, d in raw["kernels"]),
        launches=Launches(**raw["launches"]),
        timeline=tuple(timeline),
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value!r} is no positive number")
    return number


def save(session: Session, path: Path) -> None:
    """Write the session, gzipped if the name ends in .gz."""
    write(path, dumps(session) + "\n")


def write(path: Path, text: str) -> None:
    """Write any text, gzipped if the name ends in .gz; raise a ConfigError if it cannot be written."""
    data = text.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> Session:
    """Read a file that `save` wrote."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: give a file that 'warpline profile --save' wrote") from error
    return loads(text, str(path))
