"""The sweep: it compiles ahead on all cores, checks, times in turn, and continues around the best in the time left."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from warpline.errors import KernelError
from warpline.kernels.choices import MEASURED, PROJECTED
from warpline.kernels.compile import Report, compile_one
from warpline.kernels.spec import Variant
from warpline.tune.candidates import PER_ROUND, Case, Values, first_round, hopeless, impossible, near
from warpline.tune.journal import Attempt, Journal
from warpline.tune.worker import Fault, Named, Worker

#: Share of the default's time that a candidate must save to be stored: less is noise, or beyond the model's accuracy.
NOISE = {MEASURED: 0.02, PROJECTED: 0.25}
#: Most rounds through all cases; a case takes part as long as its best changes.
ROUNDS = 6
#: A case may take this many times its share of the remaining time, and at least so many seconds.
GENEROSITY, LEAST_SECONDS = 3.0, 2.0


@dataclass(eq=False, slots=True)
class Result:
    """What is known about a case."""

    case: Case
    basis: str = MEASURED
    attempts: dict[Values, Attempt] = field(default_factory=dict)
    pruned: dict[Values, str] = field(default_factory=dict)
    left_out: set[Values] = field(default_factory=set)
    why: str | None = None  # why nothing could be measured
    centre: Values | None = None  # centre of the last round's search

    @property
    def default(self) -> Attempt | None:
        """The default's attempt; None if there is none yet."""
        return self.attempts.get(self.case.default)

    @property
    def best(self) -> Attempt | None:
        """The fastest of the candidates clearly faster than the default in the same round; else the default itself."""
        default = self.default
        if default is None or default.us is None:
            return None
        most = 1 - NOISE[self.basis]
        clear = [one for one in self.attempts.values() if one.ratio <= most and one.p80 < one.default_p20]
        return min(clear, key=lambda one: one.ratio, default=default)

    @property
    def improved(self) -> bool:
        """Whether a candidate clearly beats the default."""
        return self.best is not None and self.best.values != self.case.default

    @property
    def timed(self) -> int:
        """Number of candidates that have a time."""
        return sum(one.us is not None for one in self.attempts.values())

    @property
    def faults(self) -> dict[Values, str]:
        """Candidates that failed, and why."""
        return {values: one.why for values, one in self.attempts.items() if one.why is not None}

    def plan(self) -> list[Values]:
        """Return the candidates to try next; none if the last round did not change the best."""
        around = self.best.values if self.best is not None else self.case.default
        if self.why is not None or self.centre == around:
            return []
        first, self.centre = self.centre is None, around
        if first and around == self.case.default:
            return first_round(self.case)
        return near(self.case, around, {*self.attempts, *self.pruned}, PER_ROUND // 2)


class Ahead:
    """Compiles candidates in the order in which they will be needed, on all cores but `spare`."""

    def __init__(self, spare: int = 0) -> None:
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - spare))
        self._reports: dict[Variant, Future[Report]] = {}

    def submit(self, case: Case, values: Values) -> None:
        """Queue a candidate for compilation, if it could run."""
        if impossible(case, values) is None:
            self._future(case, values)

    def fault(self, case: Case, values: Values) -> str | None:
        """Return why a candidate is excluded: it is impossible, not worthwhile by the report, or does not compile."""
        try:
            return impossible(case, values) or hopeless(case, values, self.report(case, values))
        except KernelError as error:
            return str(error).splitlines()[0]

    def report(self, case: Case, values: Values) -> Report:
        """Wait for the compiler's report and return it."""
        return self._future(case, values).result()

    def _future(self, case: Case, values: Values) -> Future[Report]:
        variant = case.variant(values)
        if variant not in self._reports:
            self._reports[variant] = self._pool.submit(lambda: compile_one(variant, case.arch).report)
        return self._reports[variant]

    def stop(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(cancel_futures=True)


class Sweep:
    """Visits all cases in rounds, until nothing changes or the time is up."""

    def __init__(
        self,
        cases: Sequence[Case],
        worker: Worker,
        journal: Journal,
        minutes: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.results = [Result(case, attempts=journal.known(case)) for case in cases]
        self._twins: dict[tuple[str, ...], list[Result]] = {}
        for result in self.results:
            self._twins.setdefault(result.case.key, []).append(result)
        self._worker, self._journal, self._clock = worker, journal, clock
        self._deadline = clock() + 60 * minutes

    def run(self, advance: Callable[[float], None] = lambda _: None) -> list[Result]:
        """Measure; `advance` is called for every case and round that is done or skipped."""
        compiled = Ahead(spare=1)  # one core is for the process that measures
        try:
            for _ in range(ROUNDS):
                plans = [(result, self._plan(result)) for result in self.results]
                plans = [(result, plan) for result, plan in plans if plan]
                if self._clock() >= self._deadline:
                    for result, plan in plans:
                        result.left_out |= {*plan} - {*result.attempts, *result.pruned}
                    break
                for result, plan in plans:
                    for values in plan:
                        if values not in result.attempts:
                            compiled.submit(result.case, values)
                for i, (result, plan) in enumerate(plans):
                    now = self._clock()
                    share = (self._deadline - now) / (len(plans) - i)
                    until = min(self._deadline, now + max(LEAST_SECONDS, GENEROSITY * share))
                    self._visit(result, plan, compiled, until)
                    advance(1)
                advance(len(self.results) - len(plans))
        finally:
            self._worker.stop()
            compiled.stop()
        return self.results

    def _plan(self, result: Result) -> list[Values]:
        """Return the candidates to try next, including the best of other ways to launch the same kernel."""
        plan = result.plan()
        others = [one.best.values for one in self._twins[result.case.key] if one.best is not None]
        known = {*plan, *result.attempts, *result.pruned}
        return plan + [values for values in dict.fromkeys(others) if values not in known and result.why is None]

    def _visit(self, result: Result, plan: Sequence[Values], compiled: Ahead, until: float) -> None:
        """Check and time the candidates of one case in one round."""
        todo = [values for values in plan if values not in result.attempts and values not in result.pruned]
        if not todo:
            return
        try:
            if result.default is not None and result.default.why is not None:
                raise Fault(f"the default fails: {result.default.why}")
            good = self._checked(result, todo, compiled, until)
            self._time(result, good)
        except Fault as fault:
            result.why = str(fault)

    def _checked(self, result: Result, todo: Sequence[Values], compiled: Ahead, until: float) -> list[Values]:
        """Return the candidates that compute correct results."""
        case, named = result.case, _named(result.case)
        good: list[Values] = []
        opened = False
        for values in todo:
            if self._clock() >= until:
                result.left_out.add(values)
                continue
            if values != case.default and (pruned := compiled.fault(case, values)):
                result.pruned[values] = pruned
                continue
            if not opened:
                self._worker.open(named)
                opened = True
            try:
                self._worker.check(named, case.tunables(values))
            except Fault as fault:
                result.attempts[values] = Attempt(values, why=str(fault))
                self._journal.write(case, [result.attempts[values]])
                if values == case.default:
                    raise Fault(f"the default fails: {fault}") from fault
            else:
                good.append(values)
            result.left_out.discard(values)
        return good

    def _time(self, result: Result, good: Sequence[Values]) -> None:
        """Time candidates beside the default and the best so far."""
        case, default = result.case, result.case.default
        if not good:
            return
        before = [default, *([result.best.values] if result.best is not None else [])]
        batch = list(dict.fromkeys([*before, *good]))
        times = self._worker.time(_named(case), [case.tunables(values) for values in batch])
        usual, usual_p20, _ = (round(t, 4) for t in times[0])
        found = [
            Attempt(values, round(us, 4), round(p20, 4), round(p80, 4), usual, usual_p20)
            for values, (us, p20, p80) in zip(batch, times, strict=True)
        ]
        result.attempts |= {one.values: one for one in found}
        self._journal.write(case, found)


def listed(cases: Sequence[Case], minutes: float, advance: Callable[[float], None]) -> list[dict[str, Any]]:
    """Return the candidates of the first round, compiled within `minutes`, and those that the report rules out."""
    deadline, compiled, found = time.monotonic() + 60 * minutes, Ahead(), []
    try:
        planned = [(case, first_round(case)) for case in cases]
        for case, plan in planned:
            for values in plan:
                compiled.submit(case, values)
        for case, plan in planned:
            known = plan if time.monotonic() < deadline else []
            faults = {values: compiled.fault(case, values) for values in known}
            found.append(
                {
                    "kernel": case.spec.name,
                    "dtype": case.dtype,
                    "dims": dict(case.dims),
                    "overlapping": case.overlapping,
                    "default": case.tunables(case.default),
                    "candidates": [case.tunables(values) for values, why in faults.items() if why is None],
                    "pruned": dict(Counter(why for why in faults.values() if why is not None)),
                    "left_out": len(plan) - len(known),
                }
            )
            advance(1)
    finally:
        compiled.stop()
    return found


def _named(case: Case) -> Named:
    return case.spec.name, case.dtype, dict(case.dims), case.overlapping
