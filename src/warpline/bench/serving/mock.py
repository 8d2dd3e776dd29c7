"""Our server with an engine that computes nothing, so that only the server is measured: `bench serve --mock`.

A turn gives every sequence `TOKENS` tokens; then the thread sleeps, as the real one waits for the device, and leaves
the interpreter to the event loop. So each stream is offered `TOKENS / SECONDS` tokens per second, less the turn.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from warpline.config import ModelConfig
from warpline.engine.clock import Stats
from warpline.engine.job import Job
from warpline.errors import ConfigError
from warpline.hardware import describe
from warpline.model import weights
from warpline.model.tokenizer import Tokenizer

#: Tokens for each sequence in a turn, and seconds of sleep after it.
TOKENS, SECONDS = 64, 0.0005
#: The text that every sequence repeats.
STORY = (
    "Once upon a time, a little robot went for a walk in the park. It liked the trees, the flowers and the birds, and "
    "it sang to them until the sun went down. “Good night,” said the moon.\n"
)


class Engine:
    """Runs jobs in a thread that hands out tokens."""

    def __init__(self, count: int, story: list[int]):
        self.count, self.stats = count, Stats()
        self.published: Callable[[], object] = lambda: None
        self._tape = story * (2 + TOKENS // len(story))
        self._story = len(story)
        self._work = threading.Condition()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="mock-engine", daemon=True)
        self._thread.start()

    @property
    def free(self) -> int:
        """Slots in which no job runs."""
        return max(0, self.count - len(self._running))

    def start(self, jobs: list[Job]) -> None:
        """Queue these jobs."""
        with self._work:
            if self._closed:
                raise ConfigError("this engine is closed")
            self._waiting += jobs
            self.stats.requests += len(jobs)
            self._work.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """End these jobs early."""
        for job in jobs:
            if not job.finished:
                job.ended = job.finished = True
                job.finish_reason = job.finish_reason or "cancelled"

    def close(self) -> None:
        """Finish the running jobs and stop the thread."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._work:
                while not (self._waiting or self._running or self._closed):
                    self._work.wait()
                if self._closed and not (self._waiting or self._running):
                    return
                room = self.count - len(self._running)
                self._running += self._waiting[:room]
                del self._waiting[:room]
            began = time.perf_counter()
            self._turn()
            self.stats.busy_seconds += time.perf_counter() - began
            time.sleep(SECONDS)

    def _turn(self) -> None:
        for job in self._running:
            if not job.ended:
                self._advance(job)
        self.published()
        self.stats.steps += TOKENS
        self.stats.lane_steps += TOKENS * len(self._running)
        self._running = [job for job in self._running if not job.ended]

    def _advance(self, job: Job) -> None:
        done = len(job.tokens)
        left = job.request.limit - job.prompt_length - done
        count = 1 if not done else min(TOKENS, left)  # the pass over the prompt gives one token
        if job.request.forced:
            tokens = list(itertools.islice(job.request.forced, done, done + count))
        else:
            begin = done % self._story
            tokens = self._tape[begin : begin + count]
        if job.request.params.logprobs is not None:
            top = np.arange(job.request.params.logprobs)
            job.logprobs += [(-1.0, -1.0 - top.astype(np.float32), top)] * len(tokens)
        job.tokens += tokens
        self.stats.tokens += len(tokens)
        cut = job.receive(tokens) if job.receive is not None else None
        if cut is not None:
            del job.tokens[cut:], job.logprobs[cut:]
            job.finish_reason, job.ended, job.finished = "stop", True, True
        elif len(tokens) >= left:
            job.finish_reason, job.ended, job.finished = "length", True, True
        if job.notify is not None:
            job.notify()


class Mock:
    """A model with a tokenizer and a shape but no weights; the server uses it as a `serve.backend.Backend`."""

    dtype = "none"
    kv_dtype: str | None = None
    folder: Path | None = None

    def __init__(self, model: str, max_batch: int = 1024):
        self.model, self.max_batch = model, max_batch
        self.config: ModelConfig = weights.read_config(model)
        self.tokenizer = Tokenizer.gpt2()
        self.device = describe("cpu")
        self.engine = Engine(max_batch, self.tokenizer.encode(STORY))

    def start(self, jobs: list[Job]) -> None:
        """Queue these jobs."""
        self.engine.start(jobs)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


def main() -> None:
    """Serve until a signal comes."""
    from warpline.serve.run import serve
    from warpline.serve.state import Settings

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    serve(lambda: Mock(asked.model), Settings(max_queue=4096), host=asked.host, port=asked.port, shutdown_timeout=1)


if __name__ == "__main__":
    main()
