"""Threads for compiled code."""

from __future__ import annotations

import os
import threading
import time

import pytest

from warpline import hardware
from warpline.kernels.cpu.team import Team

CPUS = len(hardware.allowed_cpus())


def test_a_team_hands_errors_over_and_goes_on() -> None:
    team = Team(3)

    def fail(me: int) -> int:
        if me == 2:
            raise ValueError("two")
        return me

    with pytest.raises(ValueError, match="two"):
        team.run(fail)
    assert team.run(lambda me: me + 10) == 10
    team.close()


@pytest.mark.skipif(CPUS < 2, reason="the system names no CPUs, or one")
def test_each_has_a_cpu_of_its_own_and_the_caller_its_freedom() -> None:
    """Also when both were on one CPU before, where the caller tends to be placed."""
    team, allowed, seen = Team(2), hardware.allowed_cpus(), []
    for first in sorted(allowed)[:2]:
        for _ in range(5):
            assert hardware.restrict_to({first})
            assert hardware.restrict_to(allowed)

            def where(me: int) -> None:
                begun = time.monotonic()
                while time.monotonic() - begun < 0.002:
                    seen.append((me, hardware.current_cpu()))

            seen.clear()
            team.run(where)
            mine, others = ({cpu for me, cpu in seen if me == number} for number in (0, 1))
            assert len(mine) == len(others) == 1
            assert mine != others
            assert hardware.allowed_cpus() == allowed
    with pytest.raises(ZeroDivisionError):
        team.run(lambda me: 1 // me)
    assert hardware.allowed_cpus() == allowed
    team.close()


@pytest.mark.skipif(CPUS < 2, reason="the system names no CPUs, or one")
def test_a_caller_that_may_use_one_cpu_keeps_to_it() -> None:
    team, allowed = Team(2), hardware.allowed_cpus()
    team.run(lambda _: None)
    one = {min(allowed)}

    def inside() -> None:
        hardware.restrict_to(one)
        team.run(lambda _: None)  # fewer CPUs than members: the system places them
        assert hardware.allowed_cpus() == one

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert hardware.allowed_cpus() == allowed
    team.close()


def test_a_system_that_forbids_it_chooses_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    team = Team(2)
    assert team.run(lambda me: me + 1) == 1
    team.close()
