"""Writes a session's timeline in the trace format of Perfetto and chrome://tracing, with module names on the spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from warpline.profile.classify import classify
from warpline.profile.session import TRACKS, Moment, Phase, Session

_TITLES = {"step": "steps", "module": "modules", "host": "host", "gpu": "GPU"}


def trace(session: Session) -> str:
    """Return the JSON text. Each phase is a process; steps, modules, host and GPU are its threads."""
    events: list[dict[str, Any]] = []
    for pid, phase in enumerate(session.phases, 1):
        events.append(_meta("process_name", pid, 0, f"{phase.name}: {session.label}"))
        for tid, (title, moments) in enumerate(_threads(phase), 1):
            events.append(_meta("thread_name", pid, tid, title))
            events += [_event(pid, tid, moment) for moment in moments]
    other = {"method": session.method, "device": session.device, "note": "a few steps of a recording"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other})


def _threads(phase: Phase) -> list[tuple[str, list[Moment]]]:
    """Return one thread per track, or several where moments overlap, as kernels may."""
    found = []
    for track in TRACKS:
        threads = lanes([moment for moment in phase.timeline if moment.track == track])
        for number, moments in enumerate(threads, 1):
            found.append((_TITLES[track] + (f" {number}" if len(threads) > 1 else ""), moments))
    return found


def lanes(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Distribute moments over lanes, so that any two in a lane are disjoint or nested: viewers draw nothing else."""
    found: list[tuple[list[Moment], list[int]]] = []  # each with the end times of its open moments
    for moment in sorted(moments, key=lambda m: (_ns(m.start), -_ns(m.start + m.us))):
        begin, end = _ns(moment.start), _ns(moment.start + moment.us)
        for _, ends in found:
            while ends and ends[-1] <= begin:
                ends.pop()
        free = next((one for one in found if not one[1] or end <= one[1][-1]), None)
        if free is None:
            found.append(free := ([], []))
        free[0].append(moment)
        free[1].append(end)
    return [lane for lane, _ in found]


def _ns(us: float) -> int:
    return round(1e3 * us)


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(pid: int, tid: int, moment: Moment) -> dict[str, Any]:
    module = " / ".join(moment.path) or "step"
    runs = moment.track in ("host", "gpu")
    begin, end = _ns(moment.start), _ns(moment.start + moment.us)  # both rounded, so nested moments stay nested
    return {
        "name": module if moment.track == "module" else moment.name,
        "cat": moment.track,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "args": {"module": module, "class": classify(moment.name)} if runs else {"module": module},
    }
