"""A sweep with a fake GPU: it survives and names bad candidates, continues after being killed, and keeps its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tune import standin
from tests.tune.conftest import GPU
from warpline.kernels import choices
from warpline.kernels.catalog import find
from warpline.tune import report
from warpline.tune import worker as worker_module
from warpline.tune.candidates import Case, cases, first_round
from warpline.tune.journal import Attempt, Journal
from warpline.tune.sweep import Result, Sweep, listed
from warpline.tune.worker import Fault, Worker


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "CHECKING", 2.0)
    monkeypatch.setattr(worker_module, "OPENING", 20.0)


def sweep(case: Case, journal: Journal | None = None, minutes: float = 5.0) -> Result:
    (result,) = Sweep([case], Worker(standin.serve), journal or Journal(GPU), minutes).run()
    return result


def requests() -> list[list[str]]:
    return [line.split(maxsplit=2) for line in standin.log().read_text().splitlines()]


def test_bad_candidates_are_named_and_the_best_is_found(case: Case) -> None:
    result = sweep(case)
    assert result.why is None
    assert result.faults[standin.HANGS].startswith("no answer within")
    assert result.faults[standin.CRASHES] == "the process died"
    assert result.faults[standin.POISONS] == result.faults[standin.IS_WRONG] == "an illegal address"
    assert result.best is not None
    assert result.best.values == standin.BEST
    assert result.improved
    assert result.timed + len(result.faults) + len(result.pruned) == len(first_round(case))
    assert len({process for process, *_ in requests()}) == 4  # the first, and one after each that was lost


def test_the_best_is_stored_and_picked_up(case: Case) -> None:
    choices.remember(GPU, report.choices(report.rows([sweep(case)], {"gpu": GPU})))
    found = choices.stored(case.spec, "fp16", case.dims, GPU)
    assert found == {"block": 1024, "row_warps": 4}


def test_a_finished_sweep_measures_nothing_again_unless_told(case: Case) -> None:
    first = sweep(case)
    asked = len(requests())
    again = sweep(case)
    assert len(requests()) == asked
    assert (again.best, again.faults) == (first.best, first.faults)
    sweep(case, Journal(GPU, fresh=True))
    assert len(requests()) == 2 * asked


def test_a_killed_sweep_goes_on(case: Case) -> None:
    """Killed while a candidate hangs, after others have failed: these are not tried again."""
    code = (
        "from tests.tune import standin\n"
        "from tests.tune.conftest import GPU\n"
        "from warpline.kernels.catalog import find\n"
        "from warpline.tune import worker\n"
        "from warpline.tune.candidates import cases\n"
        "from warpline.tune.journal import Journal\n"
        "from warpline.tune.sweep import Sweep\n"
        "if __name__ == '__main__':\n"
        "    case = cases([find('layernorm')], ['fp16'], 'sm_90')[0]\n"
        "    Sweep([case], worker.Worker(standin.serve), Journal(GPU), 5).run()\n"
    )
    program = Path(os.environ["WARPLINE_CACHE_DIR"]) / "program.py"
    program.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(program)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.monotonic() + 60
    while not (standin.log().exists() and "512, 'row_warps': 1" in standin.log().read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    before = len(requests())
    assert standin.IS_WRONG in Journal(GPU).known(case)
    result = sweep(case)
    assert result.best is not None
    assert result.best.values == standin.BEST
    assert "{'block': 256, 'row_warps': 1}" not in str(requests()[before:])


def test_a_torn_line_is_left_behind(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(GPU)
    journal.write(case, [Attempt((128, 1), 2.0, 1.9, 2.1, 2.0, 1.9)])
    with journal.path.open("a") as file:
        file.write('{"case": ["layernorm", "fp')
    torn = Journal(GPU)
    torn.write(case, [Attempt((256, 1), why="it hung")])
    known = Journal(GPU).known(case)
    assert known[128, 1].us == 2.0
    assert known[256, 1].why == "it hung"
    assert "1 damaged lines" in caplog.text


def test_other_code_is_another_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(GPU).write(case, [Attempt((128, 1), 2.0)])
    monkeypatch.setattr("warpline.tune.candidates.header_digest", lambda _: "changed")
    assert Journal(GPU).known(case) == {}


def test_a_default_that_fails_ends_its_case(case: Case) -> None:
    other = cases([find("layernorm")], ["fp32"], "sm_90")[0]
    results = Sweep([case, other], Worker(standin.serve_and_fail_the_default), Journal(GPU), 5.0).run()
    assert [result.why for result in results] == ["the default fails: y is off by 3"] * 2
    assert report.choices(report.rows(results, {"gpu": GPU})) == []
    again = Sweep([case], Worker(standin.serve_and_fail_the_default), Journal(GPU), 5.0).run()
    assert again[0].why == "the default fails: y is off by 3"


def test_what_there_is_no_time_for_is_left_out(case: Case) -> None:
    result = sweep(case, minutes=0.0)
    assert result.left_out == {*first_round(case)}
    assert result.best is None
    assert not standin.log().exists()


def timed(values: tuple[int, ...], us: float, usual: float, spread: float = 0.01) -> Attempt:
    return Attempt(values, us, us * (1 - spread), us * (1 + spread), usual, usual * (1 - spread))


def test_a_gain_within_the_noise_is_none(case: Case) -> None:
    default = timed((128, 1), 10.0, 10.0)
    for us, spread, improved in ((9.5, 0.01, True), (9.85, 0.001, False), (9.5, 0.04, False), (11.0, 0.01, False)):
        other = timed((256, 1), us, 10.0, spread)
        result = Result(case, attempts={one.values: one for one in (default, other)})
        assert result.improved == improved
        (choice,) = report.choices(report.rows([result], {"gpu": GPU}))
        assert choice.tunables == ({"block": 256, "row_warps": 1} if improved else None)


def test_what_is_best_in_one_way_is_tried_in_the_other(case: Case) -> None:
    twin = replace(case, overlapping=True)
    for values in ((1024, 4), (256, 2)):
        found = Sweep([case, twin], Worker(standin.serve), Journal(GPU), 5.0)
        attempts = [timed(case.default, 10.0, 10.0), timed(values, 8.0, 10.0)]
        found.results[1].attempts |= {one.values: one for one in attempts}
        found.results[0].centre = case.default  # no other candidates to search
        found.results[0].attempts[case.default] = attempts[0]
        assert found._plan(found.results[0]) == [values]


def test_one_that_scatters_does_not_hide_another(case: Case) -> None:
    attempts = [timed((128, 1), 10.0, 10.0), timed((256, 1), 8.0, 10.0, 0.3), timed((512, 1), 9.0, 10.0)]
    assert Result(case, attempts={one.values: one for one in attempts}).best is attempts[2]


def test_rounds_are_compared_by_their_own_default(case: Case) -> None:
    """A candidate does not lose because everything was slower in its round."""
    attempts = [timed((128, 1), 10.0, 10.0), timed((256, 1), 9.0, 10.0), timed((512, 1), 9.6, 12.0)]
    result = Result(case, attempts={one.values: one for one in attempts})
    assert result.best is attempts[2]


def test_a_case_goes_on_from_its_best_until_that_stays(case: Case) -> None:
    result = Result(cases([find("matmul_bias")], ["fp16"], "sm_90")[0])
    first = result.plan()
    assert first == first_round(result.case)
    found = [Attempt(values, 10.0, 9.9, 10.1, 10.0, 9.9) for values in first]
    result.attempts = {one.values: one for one in found}
    assert result.plan() == []
    better = first[5]
    result.attempts[better] = Attempt(better, 8.0, 7.9, 8.1, 10.0, 9.9)
    second = result.plan()
    assert second
    assert not {*second} & {*first}
    assert result.plan() == []


def test_worker_that_is_stopped_says_so() -> None:
    worker = Worker(standin.serve)
    worker.open(("layernorm", "fp16", {"rows": 1}, False))
    worker.stop()
    worker.stop()
    with pytest.raises(Fault, match="an illegal address"):
        worker.check(("layernorm", "fp16", {"rows": 1}, False), {"block": 256, "row_warps": 1})
    worker.stop()


def test_candidates_are_listed_without_a_gpu(case: Case) -> None:
    (row,) = listed([case], 5.0, lambda _: None)
    assert len(row["candidates"]) == len(first_round(case))
    (row,) = listed([case], 0.0, lambda _: None)
    assert row["left_out"] == len(first_round(case))


def test_time_is_asked_of_the_clock_in_minutes(case: Case) -> None:
    one = Sweep([case], Worker(standin.serve), Journal(GPU), 3.0, clock=lambda: 1000.0)
    assert one._deadline == 1180.0
    times = iter([0.0, 200.0, *[400.0] * 1000])
    (late,) = Sweep([case], Worker(standin.serve), Journal(GPU), 2.0, clock=lambda: next(times)).run()
    assert not late.attempts
    assert late.left_out
