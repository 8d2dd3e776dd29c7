"""The server's state: its backend, its status, the answers in progress, the counters."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpline.config import SamplingParams
from warpline.errors import ConfigError, ModelError, WarplineError
from warpline.serve.admission import Admission
from warpline.serve.chat import template_of
from warpline.serve.errors import ApiError
from warpline.serve.hub import Hub
from warpline.serve.metrics import Metrics
from warpline.serve.pieces import Table

if TYPE_CHECKING:
    from warpline.serve.backend import Backend
    from warpline.serve.choice import Choice
    from warpline.serve.generation import Generation, Send

logger = logging.getLogger(__name__)

#: Seconds after which an event that the client does not read ends its connection.
SLOW_READER = 30.0
#: Seconds between two attempts to restart a failed engine, and seconds one attempt may take.
PROBE, PROBE_LIMIT = 1.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a server. The defaults are safe."""

    name: str | None = None  # of the model, as clients see it
    api_keys: tuple[str, ...] = ()
    max_queue: int = 256  # sequences that wait, besides those that run
    max_body: int = 4 << 20  # bytes
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names by which clients may call the server; empty allows any
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be at least 0, not {self.max_queue}")
        if self.max_body < 1024:
            raise ConfigError(f"max_body must be at least 1024 bytes, not {self.max_body}")
        if any(not key.isascii() or not key.isprintable() or not key for key in self.api_keys):
            raise ConfigError("an API key has printable ASCII characters, and at least one")


@dataclass(eq=False)
class State:
    """One for each app. Only the event loop changes it."""

    settings: Settings
    status: str = "loading"  # then "ok", "draining" or "failed"
    metrics: Metrics = field(default_factory=Metrics)
    answers: set[Generation] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))
    why: str = ""  # why it has failed

    def attach(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        """Set the backend; from now on requests are taken."""
        self.backend, self.loop, self._thread = backend, loop, threading.get_ident()
        self.name = self.settings.name or public_name(backend.model)
        self.hub = Hub(loop)
        backend.engine.published = self.hub.wake
        self.table = Table(backend.tokenizer, backend.config.vocab_size)
        self.template = template_of(self.settings.chat_template, backend.model, backend.folder)
        self.admission = Admission(backend.max_batch, self.settings.max_queue)
        self._sweeper = loop.create_task(self._sweep())
        gc.collect()
        gc.freeze()  # objects that exist now are permanent, and the collector skips them
        self.status = "ok"

    def require_ready(self) -> None:
        """Raise while the server is loading, draining or failed."""
        if self.status == "ok":
            return
        if self.status == "loading":
            raise ApiError(503, "the model is being loaded: try again in a moment", retry_after=1, code="loading")
        if self.status == "draining":
            raise ApiError(503, "the server is shutting down", retry_after=1, code="draining", close=True)
        raise ApiError(503, f"the engine has failed: {self.why}", retry_after=5, code="engine_failed")

    # --- sequences ----------------------------------------------------------------------------------------------------

    def ended(self, answer: Generation, choice: Choice) -> None:
        """Release and count a sequence that has ended by itself."""
        self.admission.give_back(1)
        job, asked = choice.job, answer.asked
        if choice.maker is None:
            return
        reason = "error" if job.error is not None else str(job.finish_reason)
        tokens = len(job.tokens)
        self.metrics.ended(reason, job.prompt_length, tokens, asked.began, choice.first, choice.last)

    def aborted(self, choice: Choice) -> None:
        """Release and count a sequence that was cancelled."""
        self.admission.give_back(1)
        if choice.maker is not None:
            self.metrics.finished["abort"] += 1

    def timings(self, answer: Generation) -> dict[str, Any]:
        """Return the times of an answer in seconds, and its bandwidth beside the memory's limit."""
        began, jobs = answer.asked.began, [choice.job for choice in answer.choices]
        first = min(choice.first for choice in answer.choices)
        last = max(choice.last for choice in answer.choices)
        tokens = sum(len(job.tokens) for job in jobs)
        found: dict[str, Any] = {
            "first_token_seconds": round(max(0.0, first - began), 6),
            "decode_seconds": round(last - first, 6),
            "tokens_per_second": round((tokens - len(jobs)) / (last - first), 3) if last > first else None,
        }
        timings, limit = jobs[0].timings, self.backend.device.limit
        bandwidth = None if timings is None else timings.gb_per_second
        found["gb_per_second"] = None if bandwidth is None else round(bandwidth, 3)
        found["limit_gb_per_second"] = None if limit is None else round(limit[0], 3)
        return found

    # --- failures -----------------------------------------------------------------------------------------------------

    def failure(self, error: WarplineError) -> ApiError:
        """Return the error for a client after a failure of the engine."""
        said = self.public(str(error))
        if isinstance(error, ModelError):  # concerns this sequence alone
            return ApiError(500, said, code="model_error")
        if self.status == "ok":
            self.status, self.why = "failed", said
            logger.error("the engine has failed: %s", error)
            self._probe = self.loop.create_task(self._try_again())
        return ApiError(503, f"the engine has failed: {said}", retry_after=5, code="engine_failed")

    def public(self, message: str) -> str:
        """Return the message without the path of the model."""
        return message.replace(self.backend.model, self.name)

    async def _try_again(self) -> None:
        """Send probes until the engine writes a token again."""
        from warpline.engine.job import Job
        from warpline.engine.request import Request

        while self.status == "failed":
            await asyncio.sleep(PROBE)
            ended = asyncio.Event()
            job = Job(Request([0], SamplingParams(max_tokens=1), 0, 0, 2))

            def told(ended: asyncio.Event = ended) -> None:
                self.loop.call_soon_threadsafe(ended.set)

            job.notify = told
            try:
                self.backend.start([job])
                async with asyncio.timeout(PROBE_LIMIT):
                    await ended.wait()
            except (WarplineError, TimeoutError) as error:
                self.why = self.public(str(error)) or "it does not answer"
                self.backend.engine.cancel([job])
                continue
            if job.error is None and self.status == "failed":
                self.status, self.why = "ok", ""
                logger.warning("the engine works again")

    async def _sweep(self) -> None:
        """End connections whose clients do not read."""
        while True:
            await asyncio.sleep(SLOW_READER / 4)
            late = self.loop.time() - SLOW_READER
            for answer in list(self.answers):
                if answer.sending_since is not None and answer.sending_since < late:
                    answer.cut()

    async def close(self) -> None:
        """End the tasks and close the backend."""
        self.status = "draining"
        for task in (getattr(self, "_sweeper", None), getattr(self, "_probe", None)):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if hasattr(self, "backend"):
            await asyncio.to_thread(self.backend.close)

    # --- reading ------------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, tuple[str, str, float]]:
        """Return names, meanings, types and values of what is only computed when /metrics is requested."""
        engine, stats = self.backend.engine, self.backend.engine.stats
        running = engine.count - engine.free
        cpu = time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        limit = self.backend.device.limit
        return {
            "warpline:num_requests_running": ("Sequences in slots.", "gauge", running),
            "warpline:num_requests_waiting": ("Sequences that wait.", "gauge", max(0, self.admission.taken - running)),
            "warpline:num_requests_max": ("Sequences that can be in slots.", "gauge", engine.count),
            "warpline:kv_cache_usage_perc": ("Share of the slots in use.", "gauge", running / engine.count),
            "warpline:requests_refused_total": ("Requests answered with 429.", "counter", self.admission.refused),
            "warpline:engine_steps_total": ("Decode steps.", "counter", stats.steps),
            "warpline:engine_lane_steps_total": ("Sequences in all steps.", "counter", stats.lane_steps),
            "warpline:engine_drafted_tokens_total": ("Drafts that were run.", "counter", stats.drafted),
            "warpline:engine_accepted_tokens_total": ("Drafts that were right.", "counter", stats.accepted),
            "warpline:engine_busy_seconds_total": ("While the device works.", "counter", stats.busy_seconds),
            "warpline:event_loop_cpu_seconds_total": ("CPU time of the HTTP side.", "counter", cpu),
            "warpline:memory_limit_bytes_per_second": (
                "What memory can deliver; 0 if unknown.", "gauge", 0.0 if limit is None else limit[0] * 1e9,
            ),
        }  # fmt: skip

    @staticmethod
    async def respond(
        send: Send, status: int, body: bytes, kind: bytes = b"application/json", headers: Any = ()
    ) -> None:
        """Send a whole answer."""
        size = str(len(body)).encode()
        start = [(b"content-type", kind), (b"content-length", size), (b"x-content-type-options", b"nosniff"), *headers]
        await send({"type": "http.response.start", "status": status, "headers": start})
        await send({"type": "http.response.body", "body": body})


def public_name(model: str) -> str:
    """Return a model's name without its path."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or path.exists()
    return (path.resolve().name or "model") if is_path else model
