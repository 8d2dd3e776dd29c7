"""What the server knows: what generates, whether it works, who is being answered, what was counted."""

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

#: Seconds after which one event that a reader does not take ends its connection.
SLOW_READER = 30.0
#: Seconds between two tries of an engine that has failed, and how long a try may take.
PROBE, PROBE_LIMIT = 1.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set. The defaults are safe ones."""

    name: str | None = None  # of the model, as clients know it
    api_keys: tuple[str, ...] = ()
    max_queue: int = 256  # sequences that wait, beside those that run
    max_body: int = 4 << 20  # bytes
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names by which the server may be called; none allows any
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
    """One for each app. The event loop alone changes it."""

    settings: Settings
    status: str = "loading"  # then "ok", "draining" or "failed"
    metrics: Metrics = field(default_factory=Metrics)
    answers: set[Generation] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))
    why: str = ""  # it has failed

    def attach(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        """There is something that generates: from now on requests are taken."""
        self.backend, self.loop, self._thread = backend, loop, threading.get_ident()
        self.name = self.settings.name or public_name(backend.model)
        self.hub = Hub(loop)
        backend.engine.published = self.hub.wake
        self.table = Table(backend.tokenizer, backend.config.vocab_size)
        self.template = template_of(self.settings.chat_template, backend.model, backend.folder)
        self.admission = Admission(backend.max_batch, self.settings.max_queue)
        self._sweeper = loop.create_task(self._sweep())
        gc.collect()
        gc.freeze()  # what is there now stays: collections need not look at it
        self.status = "ok"

    def require_ready(self) -> None:
        """Refuse what comes too early or too late."""
        if self.status == "ok":
            return
        if self.status == "loading":
            raise ApiError(503, "the model is being loaded: try again in a moment", retry_after=1, code="loading")
        if self.status == "draining":
            raise ApiError(503, "the server is shutting down", retry_after=1, code="draining", close=True)
        raise ApiError(503, f"the engine has failed: {self.why}", retry_after=5, code="engine_failed")

    # --- of sequences -------------------------------------------------------------------------------------------------

    def ended(self, answer: Generation, choice: Choice) -> None:
        """One has come to its end by itself."""
        self.admission.give_back(1)
        job, asked = choice.job, answer.asked
        if choice.maker is None:
            return
        reason = "error" if job.error is not None else str(job.finish_reason)
        tokens = len(job.tokens)
        self.metrics.ended(reason, job.prompt_length, tokens, asked.began, choice.first, choice.last)

    def aborted(self, choice: Choice) -> None:
        """One was called off."""
        self.admission.give_back(1)
        if choice.maker is not None:
            self.metrics.finished["abort"] += 1

    def timings(self, answer: Generation) -> dict[str, Any]:
        """What an answer took, and how near the memory's limit that was."""
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

    # --- of failures --------------------------------------------------------------------------------------------------

    def failure(self, error: WarplineError) -> ApiError:
        """What a client is told of an error of the engine's."""
        said = self.public(str(error))
        if isinstance(error, ModelError):  # of this sequence alone
            return ApiError(500, said, code="model_error")
        if self.status == "ok":
            self.status, self.why = "failed", said
            logger.error("the engine has failed: %s", error)
            self._probe = self.loop.create_task(self._try_again())
        return ApiError(503, f"the engine has failed: {said}", retry_after=5, code="engine_failed")

    def public(self, message: str) -> str:
        """Without the place where the model lies."""
        return message.replace(self.backend.model, self.name)

    async def _try_again(self) -> None:
        """Until the engine writes a token again."""
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
        """End connections whose readers take nothing."""
        while True:
            await asyncio.sleep(SLOW_READER / 4)
            late = self.loop.time() - SLOW_READER
            for answer in list(self.answers):
                if answer.sending_since is not None and answer.sending_since < late:
                    answer.cut()

    async def close(self) -> None:
        """The server ends."""
        self.status = "draining"
        for task in (getattr(self, "_sweeper", None), getattr(self, "_probe", None)):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if hasattr(self, "backend"):
            await asyncio.to_thread(self.backend.close)

    # --- what is read -------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, tuple[str, str, float]]:
        """Names, meanings, types and values of what is asked when somebody reads /metrics."""
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
        """A whole answer."""
        size = str(len(body)).encode()
        start = [(b"content-type", kind), (b"content-length", size), (b"x-content-type-options", b"nosniff"), *headers]
        await send({"type": "http.response.start", "status": status, "headers": start})
        await send({"type": "http.response.body", "body": body})


def public_name(model: str) -> str:
    """A model's name without the path to it."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "/", "~")) or path.exists()
    return (path.resolve().name or "model") if is_path else model
