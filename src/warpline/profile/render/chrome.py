"""A session's timeline in the trace format that Perfetto and chrome://tracing open, module names on the spans."""

from __future__ import annotations

import json
from typing import Any

from warpline.profile.classify import classify
from warpline.profile.session import TRACKS, Moment, Session

_TITLES = {"module": "modules", "host": "host", "gpu": "GPU"}


def trace(session: Session) -> str:
    """The JSON text. Each phase is a process; modules, host and GPU are its threads."""
    events: list[dict[str, Any]] = []
    for pid, phase in enumerate(session.phases, 1):
        events.append(_meta("process_name", pid, 0, f"{phase.name}: {session.label}"))
        for tid, track in enumerate(TRACKS, 1):
            if any(moment.track == track for moment in phase.timeline):
                events.append(_meta("thread_name", pid, tid, _TITLES[track]))
        events += [_event(pid, moment) for moment in phase.timeline]
    other = {"method": session.method, "device": session.device, "note": "a few steps of a recording"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other})


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(pid: int, moment: Moment) -> dict[str, Any]:
    module = " / ".join(moment.path) or "step"
    what = {"module": module} if moment.track == "module" else {"module": module, "class": classify(moment.name)}
    return {
        "name": module if moment.track == "module" else moment.name,
        "cat": moment.track,
        "ph": "X",
        "pid": pid,
        "tid": 1 + TRACKS.index(moment.track),
        "ts": round(moment.start, 3),
        "dur": round(moment.us, 3),
        "args": what,
    }
