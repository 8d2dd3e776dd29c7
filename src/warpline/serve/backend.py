"""The interface of a backend, which generates for the server: `LLM`, or a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from warpline.config import ModelConfig

if TYPE_CHECKING:
    from warpline.engine.clock import Stats
    from warpline.engine.job import Job
    from warpline.hardware import Device
    from warpline.model.tokenizer import Tokenizer


class Slots(Protocol):
    """The part of `Engine` that the server uses. All of it may be called from the event loop, so it must not block."""

    count: int  # sequences that run at once
    stats: Stats
    published: Callable[[], object]  # called after all jobs of a turn have been notified

    @property
    def free(self) -> int:
        """Slots in which no sequence runs."""

    def cancel(self, jobs: list[Job]) -> None:
        """Cancel these jobs: mark them `ended` and `finished`, and free their slots soon."""


class Backend(Protocol):
    """`LLM` as the server sees it; a stand-in, such as a mock engine, has the same interface.

    `start` takes jobs and returns at once. From then on the backend, on a thread of its own,
    1. appends tokens to `job.tokens` (and, where `job.request.params.logprobs` is not None, to `job.logprobs` first),
    2. calls `job.receive(new_tokens)` if there is one; if it returns a number, only that many of all tokens count, and
       the job has ended with the reason "stop",
    3. at the end sets `job.finish_reason` ("stop" or "length") or `job.error`, and `job.finished`,
    4. then calls `job.notify()`, once for each chunk of tokens and not for each token. It neither blocks nor raises,
    and    returns true where the event loop should get the interpreter soon.
    A job generates at most `job.request.limit - len(job.request.prompt)` tokens.
    """

    model: str
    dtype: str
    kv_dtype: str | None
    config: ModelConfig
    tokenizer: Tokenizer
    max_batch: int
    device: Device
    folder: Path | None  # where the model's files are; None if it has none

    @property
    def engine(self) -> Slots:
        """The engine that runs the jobs."""

    def start(self, jobs: list[Job]) -> None:
        """Start these jobs and return at once."""

    def close(self) -> None:
        """Finish the running jobs and release the memory."""
