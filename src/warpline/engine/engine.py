"""The loop: sequences come, share launches, and go.

A turn admits what fits, runs prompts and decodes some steps, all enqueued without waiting. While the device works, the
host makes text of the turn before; then it waits once, for all sequences. Any thread that wants results may drive the
loop; the others wait until it has something for them, or take over when it has left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from warpline.engine.clock import Clock, OnStream, Stats, shared_stream
from warpline.engine.crossing import BROKEN, FAULT, Logprobs, News, Report
from warpline.engine.executors.base import Executor
from warpline.engine.failure import told
from warpline.engine.request import joined, needs_of
from warpline.engine.scheduler import Copy, Scheduler, Sequence, Turn
from warpline.engine.slots import Slots
from warpline.engine.text import Timings
from warpline.errors import DeviceError, ModelError, WarplineError
from warpline.model.weights import explained_memory


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
    #: Called with the tokens of each chunk; says how many of all tokens count if they ended it. Then `notify`.
    receive: Callable[[list[int]], int | None] | None = None
    notify: Callable[[], object] | None = None


@dataclass(slots=True)
class _Flight:
    """A turn under way."""

    turn: Turn
    lanes: list[Job]
    reports: list[Report]  # that have not come yet
    served: list[tuple[Timings, list[Job]]]  # whose time it is
    lengths: list[int] | None = None  # of its sequences, before
    tokens: int = 0  # that one of them has got at most


class Engine:
    """An executor, its slots and what runs in them. `count` sequences at once, of up to `capacity` positions."""

    def __init__(self, executor: Executor, count: int, capacity: int, *, model: str, own_stream: bool = True):
        self.executor, self.model, self.capacity = executor, model, capacity
        self.count = min(count, executor.most_lanes or count)
        self.stats = Stats()
        self._slots: Slots | None = None
        self.scheduler = Scheduler(
            self.count,
            prompt_tokens=executor.prompt_tokens,
            chunk=executor.chunk,
            most_steps=max(executor.chunk, executor.most_steps),
        )
        self._flight: _Flight | None = None
        self._landed: list[tuple[Job, int, bool]] = []  # what the last turn brought: its row of the news, and the end
        self._news: News | None = None
        self._idle_since: float | None = None  # the end of the turn before
        self._lead, self._changed, self._waiters = threading.Lock(), threading.Condition(), 0
        self._cuda = executor.device.type == "cuda"
        self._stream = shared_stream(executor.device) if self._cuda and own_stream else None
        self._clock = Clock(cuda=self._cuda)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, jobs: list[Job]) -> None:
        """Have these generated, together with what runs already."""
        with self._changed:
            self.scheduler.add(jobs)
            self.stats.requests += len(jobs)
            if self.free:
                self._halt()

    def run(self, done: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Until `done`, which is asked after every turn. `meanwhile` is called while the device works."""
        working, led = True, False
        while working and not done():
            if not self._lead.acquire(blocking=False):
                self._wait(done)
                continue
            try:
                while working and not done():
                    working, led = self.step(done, meanwhile), True
            finally:
                self._lead.release()
                self._tell()
        if not led:
            meanwhile()

    def cancel(self, jobs: list[Job]) -> None:
        """Not wanted any more: slots are free again now, or with the next turn of the thread that leads."""
        for job in jobs:
            if not job.finished:
                job.ended = job.finished = True
                job.finish_reason = job.finish_reason or "cancelled"
        if self._lead.acquire(blocking=False):
            try:
                with self._on_stream():
                    self._sweep()  # what is under way may write to such a slot; the next admission comes behind it
                if not (self.scheduler.waiting or self.scheduler.running):
                    self._publish()  # others that had ended
                    self._flight, self._idle_since = None, None
            finally:
                self._lead.release()
        else:
            self._halt()
        self._tell()

    def cancel_all(self) -> None:
        """Nothing is wanted any more."""
        with self._changed:
            known = [*self.scheduler.waiting, *self.scheduler.running]
        self.cancel([sequence for sequence in known if isinstance(sequence, Job)])

    def _halt(self) -> None:
        """Something has changed that the launch under way does not know: it need not take all of its steps."""
        if self._slots is not None:
            self.executor.halt(self._slots, True)

    def close(self) -> None:
        """Finish what is under way and give the slots back."""
        while True:
            self.run(lambda: self.idle)
            with self._lead:
                if self.idle:  # nothing has come since
                    if self._cuda:
                        torch.cuda.synchronize(self.executor.device)
                    self._slots = None
                    return

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.scheduler.waiting or self.scheduler.running or self._flight or self._landed)

    @property
    def free(self) -> int:
        """Slots that nothing runs in."""
        return self.count if self._slots is None else self._slots.free

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._waiters += 1
            try:
                if self._lead.locked() and not done():
                    self._changed.wait()
            finally:
                self._waiters -= 1

    def _tell(self) -> None:
        if self._waiters:
            with self._changed:
                self._changed.notify_all()

    # --- by the thread that leads -------------------------------------------------------------------------------------

    def step(self, done: Callable[[], bool] = lambda: False, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """One turn: launch it, make text of the last, wait unless all is `done`. False if there was nothing to do."""
        try:
            with self._on_stream():
                worked = bool(self._landed)
                if worked and not self._cuda:  # a launch computes at once: what is known must not wait for it
                    self._publish()
                    meanwhile()
                    if done():
                        return True
                if self._flight is None:
                    self._flight = self._launch()
                flight, worked = self._flight, worked or self._flight is not None
                self._publish()
                meanwhile()
                if flight is None:
                    return worked
                while flight.reports:
                    if done():
                        return True
                    self._land(flight)
                    if flight.reports:  # the rest of the turn is under way
                        self._publish()
                        meanwhile()
                self._flight = None
                if not (self.scheduler.waiting or any(not s.ended for s in self.scheduler.running)):
                    self._idle_since = None
                    self._sweep()
                    self._publish()
            return True
        except BaseException as error:
            said = told(error, f"generating {len(self.scheduler.running)} sequences")
            self._abandon(said)
            if said is error:
                raise
            raise said from error

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else OnStream(self._stream)

    def _sweep(self) -> None:
        with self._changed:
            gone = self.scheduler.sweep()
        for sequence in gone:
            if sequence.slot >= 0 and self._slots is not None:  # one whose launch failed may have none
                self._slots.release(sequence.slot)
                if isinstance(sequence, Job) and isinstance(sequence.error, ModelError):
                    self._slots.erase(sequence.slot)

    def _allocated(self) -> Slots:
        if self._slots is None:
            what = f"a KV cache of {self.count} × {self.capacity} positions (max_batch makes it smaller)"
            with explained_memory(what), torch.inference_mode(False):
                self._slots = self.executor.allocate(self.count, self.capacity)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.default_stream(self.executor.device))
        return self._slots

    def _launch(self) -> _Flight | None:
        """Enqueue the next turn, if there is anything to do."""
        slots, executor = self._allocated(), self.executor
        executor.halt(slots, False)  # before looking: what changes from now on is said again
        self._sweep()
        with self._changed:
            turn = self.scheduler.plan(self._wasteful)
        if turn is None:
            return None
        with executor.on_device():
            followed = any(s.followed for s in turn.reported)  # its reader may keep the host from looking in time
            self._clock.begin(prompts=bool(turn.first or turn.second), steps=turn.steps > 0, followed=followed)
            if turn.admitted:
                taken = slots.admit([s.request for s in turn.admitted])
                for sequence, slot in zip(turn.admitted, taken, strict=True):
                    sequence.slot = slot
            if self._idle_since is not None:  # the first launch of the turn is out, or is the next thing to be done
                self.stats.idle_seconds += time.perf_counter() - self._idle_since
            lanes = [s.slot for s in turn.running]
            if turn.first:
                if lanes:
                    executor.compile_ahead(slots, lanes)
                executor.prefill(slots, turn.spans(turn.first))
            self._copy(slots, turn.copies)
            if turn.second:
                executor.prefill(slots, turn.spans(turn.second))
            self._copy(slots, turn.late)
            self._clock.prompted()
            reported = [s for s in turn.reported if isinstance(s, Job)]
            taken, reports = [s.slot for s in reported], []
            for steps, last in turn.parts() if self._cuda else [(turn.steps, True)]:
                if steps:
                    executor.decode(slots, lanes, steps)
                reports.append(slots.report(taken, steps + 1, last=last))
            self._clock.stepped()
            if not self._cuda:
                self._clock.landed()  # it was computed on the way
        return _Flight(turn, reported, reports, _by_timings(turn))

    @staticmethod
    def _copy(slots: Slots, copies: list[Copy]) -> None:
        for copy in copies:
            slots.copy(copy.source.slot, [target.slot for target in copy.targets], copy.length)

    def _wasteful(self, running: list[Sequence]) -> bool:
        """Whether steps could be taken behind the end of every sequence."""
        config = self.executor.config
        params = {id(s.request.params): s.request.params for s in running}.values()
        if config.eos_token_id is None or all(p.ignore_eos for p in params):
            return False
        needs = joined(needs_of(p, config.vocab_size) for p in params)
        return not self.executor.stops_by_itself(len(running), needs)

    def _land(self, flight: _Flight) -> None:
        """Wait for a turn, or for the larger part of it, and learn which sequences have ended. The device is idle when
        the last part has come: this must be short."""
        news, last = flight.reports.pop(0).wait(), not flight.reports
        if self._cuda and last:
            self._clock.landed()
        counts, flags, lengths = news.counts.tolist(), news.flags.tolist(), []
        if flags and flags[0] & FAULT:  # every row says it
            self._allocated().fault.zero_()
            raise self.executor.fault()
        for i, (job, count) in enumerate(zip(flight.lanes, counts, strict=True)):
            if job.ended:  # before, or by the host, or cancelled, while this was under way
                if flags[i] & BROKEN and job.error is None:
                    self._allocated().erase(job.slot)
                continue
            before = job.length or job.prompt_length
            lengths.append(before)
            job.length = before + count
            if flags[i]:
                job.ended = True
                if flags[i] & BROKEN:
                    job.error = self._broken()
            self._landed.append((job, i, job.ended))
        self._news = news
        flight.tokens += max(counts, default=0)
        if flight.lengths is None:
            flight.lengths = lengths
        if last:
            self._measure(flight)
            self._idle_since = self._clock.ended

    def _broken(self) -> ModelError:
        why = f"its weights are damaged, or {self.executor.dtype} overflowed"
        return ModelError(f"{self.model} computed logits that are no numbers: {why}; try --dtype fp32")

    def _measure(self, flight: _Flight) -> None:
        turn, stats, lengths = flight.turn, self.stats, flight.lengths or []
        steps = flight.tokens - bool(turn.first or turn.second)  # a prompt brings a token before the first step
        steps = max(0, min(steps, turn.steps))
        prefill, decode = self._clock.seconds()
        stats.busy_seconds += prefill + decode
        stats.steps += steps
        stats.lane_steps += steps * len(turn.running)
        for timings, jobs in flight.served:
            if all(job.finished for job in jobs):
                continue
            timings.prefill_seconds += prefill
            if steps:
                timings.decode_seconds += decode
                timings.decode_steps += steps
                timings.moved.append((lengths, steps))

    def _publish(self) -> None:
        """Hand over what the last turn brought; the device may be busy with the next one."""
        landed, self._landed, news = self._landed, [], self._news
        if not landed or news is None:
            return
        rows, counts = news.tokens.tolist(), news.counts.tolist()
        for job, row, ended in landed:
            if not job.finished:
                count = counts[row]
                self._take(job, rows[row][:count], news.logprobs.get(job.slot), ended)
                if job.arrays is not None and count:
                    job.arrays.append(news.tokens[row, : count - (job.finish_reason == "stop")])
                if job.notify is not None:
                    job.notify()
        self._news = None
        self._tell()

    def _take(self, job: Job, tokens: list[int], logprobs: Logprobs | None, ended: bool) -> None:
        first = job.prompt_length + len(job.tokens)
        if logprobs is not None:  # before the tokens, so that there is one for each of them at any time
            for at in range(first, first + len(tokens)):
                found = float(logprobs.logprob[at]), logprobs.top_logprob[at].copy(), logprobs.top_token[at].copy()
                job.logprobs.append(found)
        job.tokens += tokens
        cut = job.receive(tokens) if job.receive is not None and tokens else None
        if cut is not None:
            del job.tokens[cut:], job.logprobs[cut:]
            job.finish_reason, job.ended, ended = "stop", True, True
        elif ended and job.error is None:
            eos = None if job.request.params.ignore_eos else self.executor.config.eos_token_id
            job.finish_reason = "stop" if job.tokens[-1] == eos else "length"
        self.stats.tokens += len(tokens)
        if ended:  # else it may have been cancelled meanwhile
            job.finished = True

    def _abandon(self, error: BaseException) -> None:
        """What was under way is lost, and says so; what waits is not, unless there is nothing to wait for."""
        lost = [job for job, *_ in self._landed] + [s for s in self.scheduler.running if isinstance(s, Job)]
        self._flight, self._idle_since, self._landed = None, None, []
        if self._slots is None:
            lost += [s for s in self.scheduler.waiting if isinstance(s, Job)]
        interrupted = DeviceError(f"the engine was interrupted: {str(error) or type(error).__name__}")
        for job in lost:
            job.ended = True
            if not job.finished:
                job.error = error if isinstance(error, WarplineError) else interrupted
                job.finished = True
        self._sweep()
        for job in lost:
            if job.notify is not None:
                with contextlib.suppress(Exception):  # the error is on its way; others must hear of it too
                    job.notify()


def _by_timings(turn: Turn) -> list[tuple[Timings, list[Job]]]:
    """The sequences of a turn, by whose time it counts for."""
    found: dict[int, tuple[Timings, list[Job]]] = {}
    for sequence in dict.fromkeys([*turn.reported, *(s for s, *_ in (*turn.first, *turn.second))]):
        if isinstance(sequence, Job) and sequence.timings is not None:
            found.setdefault(id(sequence.timings), (sequence.timings, []))[1].append(sequence)
    return list(found.values())
