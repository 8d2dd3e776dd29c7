"""A sequence as the host follows it, and a turn under way."""

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
    """A sequence, and what the host has of it for whoever asked."""

    timings: Timings | None = None
    tokens: list[int] = field(default_factory=list)
    #: Where its tokens are put as they come, but for the end of text, if somebody makes many texts together.
    arrays: list[np.ndarray] | None = None
    logprobs: list[tuple[float, np.ndarray, np.ndarray]] = field(default_factory=list)
    finish_reason: str | None = None
    error: WarplineError | None = None
    finished: bool = False  # nothing more comes
    #: Called with the tokens of each chunk; says how many of all tokens count if they ended it. Then `notify`, which
    #: says whether another thread should be let run at once.
    receive: Callable[[list[int]], int | None] | None = None
    notify: Callable[[], bool | None] | None = None


@dataclass(slots=True)
class Flight:
    """A turn under way."""

    turn: Turn
    lanes: list[Job]
    reports: list[Report]  # that have not come yet
    served: list[tuple[Timings, list[Job]]]  # whose time it is
    clock: Clock
    screened: bool  # whether its steps read codes of the LM head
    drafted: Drafted | None  # what came of drafts
    lengths: list[int] | None = None  # of its sequences, before
    tokens: int = 0  # that one of them has got at most

    @classmethod
    def of(
        cls, turn: Turn, reports: list[Report], clock: Clock, screened: bool, drafted: Drafted | None = None
    ) -> Flight:
        """A turn that has been enqueued."""
        lanes = cast(list[Job], turn.reported)  # an engine's sequences are jobs
        served: dict[int, tuple[Timings, list[Job]]] = {}
        for sequence in dict.fromkeys([*lanes, *(s for s, *_ in (*turn.first, *turn.second))]):
            if isinstance(sequence, Job) and sequence.timings is not None:
                served.setdefault(id(sequence.timings), (sequence.timings, []))[1].append(sequence)
        return cls(turn, lanes, reports, list(served.values()), clock, screened, drafted)

    def ended(self, stats: Stats) -> None:
        """All of its tokens are known: note what it took."""
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
