"""Predicts what a number of replicas would give under a load, without running them.

Time is simulated, but the engine's own scheduler decides, so that prompts, slots, the steps of a launch, and its early
end when a request arrives, are those of the server. `times.measured` gives the time of a turn. Not included: a GPU may
have the next turn of streams enqueued already, and a new request has to wait for that too.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from warpline.config import SamplingParams
from warpline.engine.request import Request
from warpline.engine.scheduler import Scheduler, Turn
from warpline.engine.scheduler import Sequence as Running
from warpline.errors import ConfigError
from warpline.scale.times import Times

#: Most sequences that wait for a slot of a replica, the default of `warpline serve --max-queue`.
QUEUE = 256
_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Asked(NamedTuple):
    """A request: when it is sent, and the tokens of its prompt and of its answer."""

    at: float
    prompt: int
    new: int


def poisson(rate: float, count: int, prompt: int, new: int, *, spread: float = 0.0, seed: int = 0) -> list[Asked]:
    """Return requests at random moments, `rate` per second, with lengths around these means."""
    if rate <= 0 or count < 1 or prompt < 1 or new < 1:
        raise ConfigError("a load has a rate above 0, and at least one request, one token of prompt and one new one")
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * draw.lognormvariate(-(spread**2) / 2, spread))) if spread else mean

    moments = itertools.accumulate((draw.expovariate(rate) for _ in range(count - 1)), initial=0.0)
    return [Asked(at, length(prompt), length(new)) for at in moments]


@dataclass(slots=True)
class Answer:
    """A request as its client sees it; times in seconds."""

    asked: Asked
    sent: float
    replica: int = -1
    first: float | None = None  # when the first token came
    ended: float | None = None
    refused: bool = False

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        if self.first is None or self.ended is None or self.asked.new < 2:
            return None
        return (self.ended - self.first) / (self.asked.new - 1)


@dataclass(slots=True)
class Outcome:
    """The result of a load."""

    answers: list[Answer]
    replicas: int
    busy: list[float] = field(default_factory=list)  # share of the time in which each replica worked

    @property
    def duration(self) -> float:
        """Seconds from the first request to the last answer."""
        ended = [one.ended for one in self.answers if one.ended is not None]
        return max(ended, default=0.0) - self.answers[0].sent

    @property
    def refused(self) -> int:
        """Number of requests that were answered with 429."""
        return sum(one.refused for one in self.answers)

    @property
    def throughput(self) -> float:
        """Tokens of answers per second."""
        return sum(one.asked.new for one in self.answers if one.ended is not None) / self.duration

    def percentile(self, name: str, share: float) -> float:
        """Return a percentile of "ttft" or "tpot" in seconds; `share` is 0 to 100."""
        values = sorted(v for one in self.answers if (v := getattr(one, name)) is not None)
        if not values:
            raise ConfigError(f"no request was answered, so there is no {name}")
        place = share / 100 * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        return float(values[low] + (values[high] - values[low]) * (place - low))

    def goodput(self, ttft: float, tpot: float) -> float:
        """Return the requests per second whose TTFT and TPOT met these goals, in seconds."""
        good = sum(
            one.ttft is not None and one.ended is not None and one.ttft <= ttft and (one.tpot or 0.0) <= tpot
            for one in self.answers
        )
        return good / self.duration


class _Replica:
    """A scheduler, and its current turn."""

    def __init__(self, times: Times):
        self._times = times
        self.scheduler = Scheduler(
            times.slots,
            prompt_tokens=times.prompt_tokens,
            chunk=times.chunk,
            most_steps=times.most_steps,
            crowd=times.crowd,
            overlaps=times.overlaps,
        )
        self.open = 0  # requests not yet answered
        self.working = 0.0
        self.version = 0  # of the turn: the end of an older version is void
        self.answers: dict[int, Answer] = {}  # by the id of their sequence
        self._turn: Turn | None = None
        self._began = self._stepping = self._step = self._end = 0.0
        self._steps = 0

    @property
    def turning(self) -> bool:
        """Whether a turn is running."""
        return self._turn is not None

    def add(self, answer: Answer) -> None:
        """Give a request to the scheduler."""
        prompt, new = answer.asked.prompt, answer.asked.new
        sequence = Running(Request(range(prompt), _GREEDY, 0, 0, prompt + new), followed=True)
        self.answers[id(sequence)] = answer
        self.scheduler.add([sequence])

    def halt(self, now: float) -> float | None:
        """End the launch after its current step if slots are free for a request that arrived; return its new end."""
        turn = self._turn
        if turn is None or not self._times.halts or len(self.scheduler.running) >= self._times.slots or not self._steps:
            return None
        taken = max(1, -int(-(now - self._stepping) // self._step)) if self._step else self._steps
        if taken >= self._steps:
            return None
        self._steps, self._end = taken, self._stepping + taken * self._step
        return self._end

    def begin(self, now: float) -> float | None:
        """Begin the next turn and return when it ends; None if there is nothing to do."""
        self.scheduler.sweep()
        turn = self._turn = self.scheduler.plan(lambda running: False)
        if turn is None:
            return None
        times = self._times
        tokens = sum(end - start for _, start, end in (*turn.first, *turn.second))
        positions = sum(s.length for s in turn.running) + len(turn.running) * turn.steps // 2
        self._step, self._steps = times.step(len(turn.running), positions) if turn.running else 0.0, turn.steps
        self._began, self._stepping = now, now + times.turn + times.prompt(tokens)
        self._end = self._stepping + self._steps * self._step
        return self._end

    def end(self, now: float) -> list[Answer]:
        """End the turn and add its tokens; return the answers that are complete."""
        turn, self._turn = self._turn, None
        assert turn is not None
        self.working += now - self._began
        turn.landed()
        running, begun = set(map(id, turn.running)), set(map(id, turn.begun))
        ended = []
        for sequence in turn.reported:
            answer = self.answers[id(sequence)]
            tokens = (self._steps if id(sequence) in running else 0) + (id(sequence) in begun)
            sequence.length = min(sequence.length + tokens, sequence.request.limit)
            if answer.first is None:
                answer.first = self._stepping if self._times.overlaps else now
            if sequence.length >= sequence.request.limit:
                sequence.ended, answer.ended = True, now
                del self.answers[id(sequence)]
                self.open -= 1
                ended.append(answer)
        return ended


_SENT, _ARRIVED, _TURNED = range(3)


def simulate(
    times: Times,
    load: Iterable[Asked],
    *,
    replicas: int = 1,
    concurrency: int | None = None,
    queue: int = QUEUE,
) -> Outcome:
    """Simulate a load; each request goes to the replica with the fewest open ones. `concurrency` limits the open
    requests of all clients together."""
    asked = list(load)
    if replicas < 1 or not asked:
        raise ConfigError("a simulation has at least one replica and one request")
    return _Simulation(times, asked, replicas, queue).run(concurrency or len(asked))


class _Simulation:
    """Events in the order of time: a client sends a request, it arrives at a replica, a replica ends a turn."""

    def __init__(self, times: Times, asked: Sequence[Asked], replicas: int, queue: int):
        self._asked, self._machines = asked, [_Replica(times) for _ in range(replicas)]
        self._there = self._back = times.request / 2
        self._most_open = times.slots + queue
        self._waiting = list(range(len(asked)))[::-1]  # requests that are not sent yet
        self._answers: list[Answer] = []
        self._events: list[tuple[float, int, int, int, int]] = []  # time, order, kind, number, version
        self._order = itertools.count()

    def run(self, concurrency: int) -> Outcome:
        for _ in range(min(concurrency, len(self._asked))):
            self._send(0.0)
        while self._events:
            now, _, kind, number, version = heapq.heappop(self._events)
            if kind == _SENT:
                self._route(number, now)
            elif kind == _ARRIVED:
                self._arrive(self._answers[number], now)
            elif version == self._machines[number].version and self._machines[number].turning:
                for _ in self._machines[number].end(now)[: len(self._waiting)]:
                    self._send(now + self._back)
                self._begin(number, now)
        for answer in self._answers:
            answer.first = None if answer.first is None else answer.first + self._back
            answer.ended = None if answer.ended is None else answer.ended + self._back
        outcome = Outcome(sorted(self._answers, key=lambda one: one.sent), len(self._machines))
        if outcome.duration:
            outcome.busy = [machine.working / outcome.duration for machine in self._machines]
        return outcome

    def _push(self, at: float, kind: int, number: int, version: int = 0) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, number, version))

    def _send(self, now: float) -> None:
        number = self._waiting.pop()
        self._push(max(now, self._asked[number].at), _SENT, number)

    def _route(self, number: int, now: float) -> None:
        """Pass a request to the replica with the fewest open ones, or refuse it where the queue is full."""
        answer = Answer(self._asked[number], now)
        self._answers.append(answer)
        fewest, count, turn = min(m.open for m in self._machines), len(self._machines), len(self._answers)
        # Equal replicas get requests in turn.
        chosen = min(range(count), key=lambda i: (self._machines[i].open != fewest, (i - turn) % count))
        if self._machines[chosen].open >= self._most_open:
            answer.refused = True
            if self._waiting:
                self._send(now + (self._there + self._back))
            return
        self._machines[chosen].open += 1
        answer.replica = chosen
        self._push(now + self._there, _ARRIVED, turn - 1)

    def _arrive(self, answer: Answer, now: float) -> None:
        machine = self._machines[answer.replica]
        machine.add(answer)
        if not machine.turning:
            self._begin(answer.replica, now)
        elif (end := machine.halt(now)) is not None:
            machine.version += 1
            self._push(max(now, end), _TURNED, answer.replica, machine.version)

    def _begin(self, number: int, now: float) -> None:
        """Begin a replica's next turn, if it has work."""
        end = self._machines[number].begin(now)
        if end is not None:
            self._machines[number].version += 1
            self._push(end, _TURNED, number, self._machines[number].version)


def replicas_for(times: Times, load: Sequence[Asked], *, ttft: float, tpot: float, share: float = 99.0) -> int:
    """Return the fewest replicas with which this share (0 to 100) of the requests meets both goals, in seconds."""
    most = 4096

    def meets(count: int) -> bool:
        found = simulate(times, load, replicas=count)
        return not found.refused and found.percentile("ttft", share) <= ttft and found.percentile("tpot", share) <= tpot

    high = 1
    while not meets(high):
        if high >= most:
            raise ConfigError(f"not even {most:,} replicas meet these goals: a single request takes longer")
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high
