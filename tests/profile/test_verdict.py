"""The first remedy of the verdict, for sessions with a known answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conftest import SMALL
from tests.profile.conftest import made_up
from warpline.profile import collect
from warpline.profile.collect import ProfileRequest
from warpline.profile.compare import compare
from warpline.profile.session import Session, SpanRow, Work, dumps, loads
from warpline.profile.verdict import findings, verdict


def with_logits(count: int, cpu_us: float | None = None) -> Session:
    """Return a prompt on a CPU for which the head computes this many positions."""
    work = Work(128, 0, count, naive=False)
    session = made_up(name="prefill", kind="cpu", change={("LM head",): 900.0}, work=work, tflop_s=1.0, read_gb_s=50.0)
    return replace(session, phases=(replace(session.phases[0], cpu_us=cpu_us),))


def test_the_head_over_all_positions_is_the_largest_lever() -> None:
    session = with_logits(128)
    best = findings(session, session.phases[0])[0]
    assert best.kind == "logits of all positions"
    assert best.saved_us == pytest.approx(900 * 127 / 128, rel=0.01)
    assert "all 128 positions" in verdict(session, session.phases[0])
    one = with_logits(1)
    assert "logits of all positions" not in [found.kind for found in findings(one, one.phases[0])]


def test_an_executor_that_is_faster_is_named_first_and_kept() -> None:
    session = with_logits(128, cpu_us=50.0)
    phase = session.phases[0]
    assert findings(session, phase)[0].kind == "another executor"
    assert "--executor cpu" in verdict(session, phase)
    assert "Next: logits of all positions" in verdict(session, phase)
    assert loads(dumps(session)).phases[0].cpu_us == 50.0
    slower = with_logits(128, cpu_us=1e6)
    assert "another executor" not in [found.kind for found in findings(slower, slower.phases[0])]


def test_a_method_that_cannot_be_seen_is_not_compared_module_by_module() -> None:
    seen = made_up()
    phase = seen.phases[0]
    blind = replace(seen, method="cpu", phases=(replace(phase, spans=(SpanRow(("whole model",), 50.0, 1.0),)),))
    for before, after in ((seen, blind), (blind, seen)):
        (found,) = compare(before, after)
        assert [change.name for change in found.modules] == ["step"]
        assert "modules of cpu are not seen, so those of the other are left out" in found.notes
    (both,) = compare(seen, seen)
    assert len(both.modules) > 10
    assert both.notes == ()


def test_the_verdict_says_whose_time_it_takes() -> None:
    session = with_logits(1)
    noisy = replace(session.phases[0], plain_us=2 * session.phases[0].step_us)
    assert "recorded; noise made it shorter" in verdict(session, noisy)
    assert "as recorded" not in verdict(session, session.phases[0])


def test_a_step_that_nobody_records_is_not_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it was seven times as long; then the recorded steps count, and a note says so."""
    monkeypatch.setattr(collect._Recorder, "_plain", lambda self, name: 1e9)
    found = collect.collect(ProfileRequest(method="torch", model=SMALL, dtype="fp32", device="cpu", context=8, steps=2))
    for phase in found.phases:
        assert phase.plain_us == phase.step_us
        assert collect.NOISE.format(phase.name) in found.notes
