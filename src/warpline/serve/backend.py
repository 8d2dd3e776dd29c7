"""What the server needs of whatever generates: `LLM`, or something that stands in for it."""

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
    """The part of `Engine` that the server asks. All of it may be called from the event loop, so it must not block."""

    count: int  # sequences that run at once
    stats: Stats
    published: Callable[[], object]  # to be called when all of a turn's jobs have been notified

    @property
    def free(self) -> int:
        """Slots that nothing runs in."""

    def cancel(self, jobs: list[Job]) -> None:
        """Not wanted any more: mark them `ended` and `finished`, and free their slots soon."""


class Backend(Protocol):
    """`LLM` as the server sees it; a stand-in, such as a mock engine, has the same.

    `start` takes jobs and returns at once. From then on, on a thread of its own, whoever runs them
    1. appends tokens to `job.tokens` (and, where `job.request.params.logprobs` is not None, to `job.logprobs` first),
    2. calls `job.receive(new_tokens)` if there is one; if it gives a number, only so many tokens of all count, and the
       job has ended with the reason "stop",
    3. at the end sets `job.finish_reason` ("stop" or "length") or `job.error`, and `job.finished`,
    4. then calls `job.notify()`, once for each chunk of tokens and not for each token. That neither blocks nor raises;
       it is true where the event loop should get the interpreter soon.
    A job has `job.request.limit - len(job.request.prompt)` tokens at most.
    """

    model: str
    dtype: str
    kv_dtype: str | None
    config: ModelConfig
    tokenizer: Tokenizer
    max_batch: int
    device: Device
    folder: Path | None  # where the model's files are, if it has any

    @property
    def engine(self) -> Slots:
        """What runs the jobs."""

    def start(self, jobs: list[Job]) -> None:
        """Begin these."""

    def close(self) -> None:
        """Finish what is under way and give memory back."""
