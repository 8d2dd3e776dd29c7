"""The sessions under results/: each opens, sums, and has a verdict; none is faster than its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from warpline.profile import tree
from warpline.profile.classify import classes
from warpline.profile.render.chrome import trace
from warpline.profile.render.html import page
from warpline.profile.roofline import whole
from warpline.profile.session import Session, read
from warpline.profile.verdict import verdict

RESULTS = Path(__file__).parents[2] / "results"
PATHS = sorted(RESULTS.glob("*/profile/*.json"))


@pytest.fixture(params=PATHS, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def session(request: pytest.FixtureRequest) -> Session:
    return read(request.param)


def test_there_are_some() -> None:
    assert PATHS


def test_sums(session: Session) -> None:
    for phase in session.phases:
        for merge in (True, False):
            assert tree.build(phase, merge=merge).us == pytest.approx(phase.step_us, rel=0.02)
        assert sum(row.us for row in phase.kernels) == pytest.approx(phase.busy_us, rel=0.02)
        assert sum(row.us for row in classes(phase)) == pytest.approx(phase.busy_us, rel=0.02)
        assert phase.fastest_us <= phase.step_us <= phase.slowest_us


def test_nothing_is_faster_than_its_machine(session: Session) -> None:
    for phase in session.phases:
        point = whole(session, phase)
        # A CPU's memory may be shared, and other programs were busier when its roof was measured.
        most = 1.1 if session.kind == "cpu" else 1
        assert 0 < point.share <= most
        assert point.roof_us <= most * phase.free_us


def test_there_is_a_verdict(session: Session) -> None:
    for phase in session.phases:
        text = verdict(session, phase)
        assert f"A {phase.name} step takes" in text
        assert len(text) > 100


def test_steps_are_on_the_timeline(session: Session) -> None:
    """Each step has something inside, and the session can be drawn."""
    for phase in session.phases:
        steps = [moment for moment in phase.timeline if moment.track == "step"]
        assert steps
        device = "gpu" if session.kind == "cuda" else "host"
        for step in steps:
            own = [m for m in phase.timeline if m.track == device and step.start <= m.start < step.start + step.us]
            assert own
    assert "<canvas" in page(session)
    assert "traceEvents" in trace(session)
