"""A sequence with what the host has of it, and an engine turn in progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from warpline.engine.clock import Clock, Drafted, Stats
from warpline.engine.crossing import Report
from warpline.engine.scheduler import Sequence, Turn
from warpline.engine.text import Timings
from warpline.errors import WarplineError


@dataclass(eq=False, slots=True)
class Job(Sequence):
    """A sequence, and what the host has of it for the caller."""

    timings: Timings | None = None
    tokens: list[int] = field(default_factory=list)
    #: If given, receives the tokens of each chunk without the end of text, for code that decodes many texts at once.
    arrays: list[np.ndarray] | None = None
    logprobs: list[tuple[float, np.ndarray, np.ndarray]] = field(default_factory=list)
    finish_reason: str | None = None
    error: WarplineError | None = None
    finished: bool = False  # no more tokens will come
    #: Called with the tokens of each chunk; returns how many of all tokens count if the chunk ended the text, else
    #: None. Then `notify` is called; it returns whether another thread should run at once.
    receive: Callable[[list[int]], int | None] | None = None
    notify: Callable[[], bool | None] | None = None


@dataclass(slots=True)
class Flight:
    """An engine turn in progress."""

    turn: Turn
    lanes: list[Job]
    reports: list[Report]  # that have not arrived yet
    served: list[tuple[Timings, list[Job]]]  # calls that the turn's time counts for
    clock: Clock
    screened: bool  # whether its steps read the codes of the LM head
    drafted: Drafted | None  # counts of drafts
    lengths: list[int] | None = None  # of its sequences, before the turn
    tokens: int = 0  # most tokens that one of them has got

    @classmethod
    def of(
        cls, turn: Turn, reports: list[Report], clock: Clock, screened: bool, drafted: Drafted | None = None
    ) -> Flight:
        """Return the flight of a turn that has been enqueued."""
        lanes = cast(list[Job], turn.reported)  # the sequences of an engine are jobs
        served: dict[int, tuple[Timings, list[Job]]] = {}
        for sequence in dict.fromkeys([*lanes, *(s for s, *_ in (*turn.first, *turn.second))]):
            if isinstance(sequence, Job) and sequence.timings is not None:
                served.setdefault(id(sequence.timings), (sequence.timings, []))[1].append(sequence)
        return cls(turn, lanes, reports, list(served.values()), clock, screened, drafted)

    def ended(self, stats: Stats) -> None:
        """Record time and counts. Requires: all tokens of the turn are known."""
        turn, lengths = self.turn, self.lengths or []
        turn.landed()
        steps = self.tokens - bool(turn.begun)  # a prompt brings a token before the first step
        steps = max(0, min(steps, turn.steps))
        drafted = self.drafted or Drafted(steps, steps * len(turn.running), 0, 0)
        steps = drafted.steps
        prefill, decode = self.clock.seconds()
        stats.busy_seconds += prefill + decode
        stats.steps += steps
        stats.lane_steps += drafted.lane_steps
        stats.drafted += drafted.drafted
        stats.accepted += drafted.accepted
        for timings, jobs in self.served:
            if all(job.finished for job in jobs):
                continue
            timings.prefill_seconds += prefill
            if steps:
                timings.decode_seconds += decode
                timings.decode_steps += steps
                timings.lane_steps += drafted.lane_steps
                timings.drafted += drafted.drafted
                timings.accepted += drafted.accepted
                timings.moved.append((lengths, steps, self.screened))
