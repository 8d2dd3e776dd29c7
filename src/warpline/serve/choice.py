"""One sequence of an answer; it connects the engine's thread with the event loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from warpline.serve.hub import Hub
from warpline.serve.pieces import Maker, Piece

if TYPE_CHECKING:
    from warpline.engine.job import Job
    from warpline.serve.generation import Generation


class Choice:
    """Follows a job. `told` runs in the engine's thread, everything else in the event loop."""

    __slots__ = (
        "answer", "begun", "changed", "closed", "eager", "finished", "first", "hub", "index", "job", "last", "maker",
        "metrics", "ready", "sent", "streamed", "waiting",
    )  # fmt: skip

    def __init__(
        self, answer: Generation, hub: Hub, job: Job, index: int, maker: Maker | None, *, streamed: bool, eager: bool
    ):
        self.answer, self.hub, self.job, self.index, self.maker = answer, hub, job, index, maker
        self.streamed, self.eager, self.metrics = streamed, eager, answer.state.metrics
        self.waiting = self.changed = self.finished = self.closed = self.begun = False
        self.ready = self.sent = 0  # tokens that may be read, and tokens that were read
        self.first = self.last = 0.0  # when the first and the last tokens came
        job.notify = self.told

    def told(self) -> bool:
        """Note new tokens or the end after a turn of the engine. Return whether the event loop should run at once."""
        job = self.job
        if self.finished:
            return False
        finished, now, ready = job.finished, time.perf_counter(), len(job.tokens)
        if ready > self.ready and self.maker is not None:
            self.metrics.wrote(ready - self.ready, now - self.last if self.first else 0.0)
        if not self.first:
            self.first = now
        self.last, self.ready = now, ready
        self.finished = finished
        if not (finished or self.streamed):
            return False
        urgent = finished or self.eager or not self.sent
        self.hub.tell(self, urgent=urgent)
        return urgent

    def arrived(self) -> None:
        """Pass the news on to the answer; called by the hub."""
        self.answer.arrived(self)

    def pieces(self) -> list[Piece]:
        """Return the text that has not been sent."""
        assert self.maker is not None
        ended, ready, job = self.finished, self.ready, self.job
        tokens = job.tokens[self.sent : ready]
        self.sent = ready
        if ended and tokens and job.finish_reason == "stop":
            eos = self.answer.eos
            if tokens[-1] == eos and not job.request.params.ignore_eos:
                tokens.pop()
        return self.maker.take(tokens, ended=ended) if tokens or ended else []
