"""The engine loop: sequences arrive, share launches, and leave.

An engine turn admits what fits, runs prompts and decodes some steps, all enqueued without waiting. While the device
works, the host makes text of the turn before; then it waits once, for all sequences. Turns that serve streams are
short, so on a GPU the next one is enqueued before the last has ended. Any thread that wants results may drive the loop
(it leads); the others wait for their results, or take over when the leader has left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from warpline.engine.clock import Clock, OnStream, Stats, shared_stream
from warpline.engine.crossing import FAULT, NOT_FINITE, Logprobs, News
from warpline.engine.executors.base import Executor
from warpline.engine.failure import told
from warpline.engine.job import Flight, Job
from warpline.engine.request import joined, needs_of
from warpline.engine.scheduler import Copy, Scheduler, Sequence
from warpline.engine.slots import Slots
from warpline.errors import DeviceError, ModelError, WarplineError
from warpline.model.weights import explained_memory

#: Seconds for which the leading thread sleeps when a reader wants to run; the reader would otherwise wait for the
#: interpreter's lock until the next launch is enqueued.
YIELD = 20e-6


class Engine:
    """An executor, its slots and the sequences in them: up to `count` sequences of up to `capacity` positions."""

    def __init__(self, executor: Executor, count: int, capacity: int, *, model: str, own_stream: bool = True):
        self.executor, self.model, self.capacity = executor, model, capacity
        self.count = min(count, executor.most_lanes or count)
        self.stats = Stats()
        #: Called after the jobs' own `notify`, when all of them have the results of a turn.
        self.published: Callable[[], object] = lambda: None
        self._slots: Slots | None = None
        self.scheduler = Scheduler(
            self.count,
            prompt_tokens=executor.prompt_tokens,
            chunk=executor.chunk,
            most_steps=max(executor.chunk, executor.most_steps),
            crowd=executor.crowd,
            overlaps=executor.device.type == "cuda",
        )
        self._flights: deque[Flight] = deque()  # in launch order; at most two
        self._landed: list[tuple[Job, int, bool]] = []  # results of the last turn: job, row of the news, ended
        self._news: News | None = None
        self._idle_since: float | None = None  # the end of the turn before
        self._lead, self._changed, self._waiters = threading.Lock(), threading.Condition(), 0
        self._cuda = executor.device.type == "cuda"
        self._stream = shared_stream(executor.device) if self._cuda and own_stream else None
        self._clocks = deque(Clock(cuda=self._cuda) for _ in range(2))  # used in alternate turns

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs, to be generated together with those that run already. Any thread may call it."""
        with self._changed:
            self.scheduler.add(jobs)
            self.stats.requests += len(jobs)
            if self.free:
                self._halt()

    def run(self, done: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Drive the engine, or wait for the thread that does, until `done`, which is called after every turn.
        `meanwhile` is called while the device works."""
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
        """End these jobs; their slots are free at once, or with the next turn of the leading thread."""
        for job in jobs:
            if not job.finished:
                job.ended = job.finished = True
                job.finish_reason = job.finish_reason or "cancelled"
        if self._lead.acquire(blocking=False):
            try:
                with self._on_stream():
                    self._sweep()  # launches in flight may write to such a slot; the next admission comes after them
                if not (self.scheduler.waiting or self.scheduler.running):
                    self._publish()  # jobs that had ended before
                    self._flights.clear()
                    self._idle_since = None
            finally:
                self._lead.release()
        else:
            self._halt()
        self._tell()

    def cancel_all(self) -> None:
        """End all jobs."""
        with self._changed:
            known = [*self.scheduler.waiting, *self.scheduler.running]
        self.cancel([sequence for sequence in known if isinstance(sequence, Job)])

    def _halt(self) -> None:
        """Ask the launch in flight to end early, because the set of sequences has changed."""
        if self._slots is not None:
            self.executor.halt(self._slots, True)

    def close(self) -> None:
        """Finish all jobs and free the slots."""
        while True:
            self.run(lambda: self.idle)
            with self._lead:
                if self.idle:  # no job has come since
                    if self._cuda:
                        torch.cuda.synchronize(self.executor.device)
                    self._slots = None
                    return

    def prepare(self) -> None:
        """Compile, bind and capture all that requests may need."""
        with self._lead, self._on_stream(), self.executor.on_device():
            self.executor.prepare_all(self._allocated())

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.scheduler.waiting or self.scheduler.running or self._flights or self._landed)

    @property
    def free(self) -> int:
        """Slots that no sequence uses."""
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
        """Run one turn: launch it, publish the last one, and wait for it unless `done`. Returns False if there was
        nothing to do. Only the leading thread calls it."""
        try:
            with self._on_stream():
                worked = bool(self._landed)
                # Publish first if the device is busy anyway, or if the host would otherwise compute before it
                # publishes.
                if worked and (self._flights or not self.scheduler.overlaps):
                    self._publish()
                    meanwhile()
                    if done():
                        return True
                if not self._flights:
                    self._launch()
                self._publish()
                meanwhile()
                if not self._flights:
                    return worked
                flight = self._flights[0]
                while flight.reports:
                    if done():
                        return True
                    self._launch_ahead()
                    self._land(flight)
                    if flight.reports:  # the rest of the turn is in flight
                        self._publish()
                        meanwhile()
                self._flights.popleft()
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
            if sequence.slot >= 0 and self._slots is not None:  # a sequence whose launch failed may have no slot
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

    def _launch_ahead(self) -> None:
        """Enqueue the next turn before the last has ended, so that the device does not wait for the host. Only where
        streams are served and no sequence waits to join; first tokens are published before that."""
        if self.scheduler.overlaps and len(self._flights) == 1:
            flight = self._flights[0]
            if flight.turn.followed and len(flight.reports) == 1:
                self._launch()

    def _launch(self) -> None:
        """Enqueue the next turn, if there is anything to do. Slots are reassigned only while no turn is in flight."""
        slots, executor = self._allocated(), self.executor
        executor.halt(slots, False)  # before planning: later changes ask again
        self._sweep()
        with self._changed:
            if self._flights and self.scheduler.waiting:
                return
            turn = self.scheduler.plan(self._wasteful)
        if turn is None:
            return
        self._clocks.rotate()
        clock = self._clocks[0]
        with executor.on_device():
            followed = turn.followed  # a reader may delay the host
            clock.begin(prompts=bool(turn.first or turn.second), steps=turn.steps > 0, followed=followed)
            if turn.admitted:
                taken = slots.admit([s.request for s in turn.admitted])
                for sequence, slot in zip(turn.admitted, taken, strict=True):
                    sequence.slot = slot
            if self._idle_since is not None:  # the first launch has been enqueued, or is enqueued next
                self.stats.idle_seconds += time.perf_counter() - self._idle_since
                self._idle_since = None
            lanes = [s.slot for s in turn.running]
            if turn.first:
                if lanes:
                    executor.compile_ahead(slots, lanes)
                executor.prefill(slots, turn.spans(turn.first))
            self._copy(slots, turn.copies)
            if turn.second:
                executor.prefill(slots, turn.spans(turn.second))
            self._copy(slots, turn.late)
            clock.prompted()
            taken, reports = [s.slot for s in turn.reported], []
            for steps, last in turn.parts() if self.scheduler.overlaps else [(turn.steps, True)]:
                if steps:
                    executor.decode(slots, lanes, steps)
                if last:
                    clock.stepped()
                reports.append(slots.report(taken, steps * (1 + executor.drafts) + 1, last=last and not followed))
            if not self._cuda:
                clock.landed()  # the CPU has computed it already
        screened = bool(lanes) and executor.screens(slots, lanes)
        drafted = executor.counted(slots) if turn.steps else None
        self._flights.append(Flight.of(turn, reports, clock, screened, drafted))

    @staticmethod
    def _copy(slots: Slots, copies: list[Copy]) -> None:
        for copy in copies:
            slots.copy(copy.source.slot, [target.slot for target in copy.targets], copy.length)

    def _wasteful(self, running: list[Sequence]) -> bool:
        """Whether steps could be computed after the end of every sequence."""
        config = self.executor.config
        params = {id(s.request.params): s.request.params for s in running}.values()
        if config.eos_token_id is None or all(p.ignore_eos for p in params):
            return False
        needs = joined(needs_of(p, config.vocab_size) for p in params)
        return not self.executor.stops_by_itself(len(running), needs)

    def _land(self, flight: Flight) -> None:
        """Wait for a turn, or for the first part of it, and note which sequences have ended. The device is idle after
        the last part, so this must be short."""
        news, last = flight.reports.pop(0).wait(), not flight.reports
        if self._cuda and last:
            flight.clock.landed()
        counts, flags, lengths = news.counts.tolist(), news.flags.tolist(), []
        if flags and flags[0] & FAULT:  # every row has it
            self._allocated().fault.zero_()
            raise self.executor.fault()
        for i, (job, count) in enumerate(zip(flight.lanes, counts, strict=True)):
            if job.ended:  # ended earlier, by the host or by `cancel`, while this turn was in flight
                if flags[i] & NOT_FINITE and job.error is None:
                    self._allocated().erase(job.slot)
                continue
            lengths.append(job.length)
            job.length += count
            if flags[i]:
                job.ended = True
                if flags[i] & NOT_FINITE:
                    job.error = self._not_finite()
            if count or job.ended:
                self._landed.append((job, i, job.ended))
        self._news = news
        flight.tokens += max(counts, default=0)
        if flight.lengths is None:
            flight.lengths = lengths
        if last:
            flight.ended(self.stats)
            if len(self._flights) == 1:
                self._idle_since = flight.clock.ended

    def _not_finite(self) -> ModelError:
        why = f"its weights are damaged, or {self.executor.dtype} overflowed"
        return ModelError(f"{self.model} computed logits that are no numbers: {why}; try --dtype fp32")

    def _publish(self) -> None:
        """Hand over the results of the last turn; the device may be busy with the next one."""
        landed, self._landed, news = self._landed, [], self._news
        if not landed or news is None:
            return
        rows, counts, urgent = news.tokens.tolist(), news.counts.tolist(), False
        for job, row, ended in landed:
            if not job.finished:
                count = counts[row]
                self._take(job, rows[row][:count], news.logprobs.get(job.slot), ended)
                if job.arrays is not None and count:
                    job.arrays.append(news.tokens[row, : count - (job.finish_reason == "stop")])
                if job.notify is not None and job.notify():
                    urgent = True
        self._news = None
        self._tell()
        self.published()
        if urgent:  # the device is busy, or nothing is to be launched, or the next launch takes far longer
            time.sleep(YIELD)

    def _take(self, job: Job, tokens: list[int], logprobs: Logprobs | None, ended: bool) -> None:
        first = job.prompt_length + len(job.tokens)
        if logprobs is not None:  # before the tokens, so that every visible token has one
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
        if ended:  # otherwise it may have been cancelled meanwhile
            job.finished = True

    def _abandon(self, error: BaseException) -> None:
        """Fail all running jobs with an error. Waiting jobs stay, unless there are no slots."""
        lost = [job for job, *_ in self._landed] + [s for s in self.scheduler.running if isinstance(s, Job)]
        self._flights.clear()
        self._idle_since, self._landed = None, []
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
                with contextlib.suppress(Exception):  # the error is raised anyway; the other jobs must be notified too
                    job.notify()
        self.published()
