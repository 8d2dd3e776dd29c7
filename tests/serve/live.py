"""A server in a thread, and a scripted engine."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from warpline import hardware
from warpline.config import ModelConfig
from warpline.engine.clock import Stats
from warpline.engine.job import Job
from warpline.errors import WarplineError
from warpline.model.tokenizer import Tokenizer
from warpline.serve.app import create_app
from warpline.serve.backend import Backend
from warpline.serve.run import Server, bound, url_of
from warpline.serve.state import Settings, State

TOKENIZER = Tokenizer.gpt2()


class Live:
    """A server that takes requests."""

    def __init__(self, server: Server, url: str):
        self.server, self.url, self.state = server, url, server.state
        self.port = int(url.rpartition(":")[2])

    def request(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """Return status, the JSON or the text, and the headers."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urlopen(asked, timeout=60) as answer:
                status, raw, said = answer.status, answer.read(), answer.headers
        except OSError as error:
            if not hasattr(error, "read"):
                raise
            status, raw, said = error.code, error.read(), error.headers  # type: ignore[attr-defined]
        is_json = said.get("content-type", "").startswith("application/json")
        return status, json.loads(raw) if is_json else raw.decode(), said

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return all events of a stream; [DONE] as None."""
        status, text, _ = self.request(path, {**body, "stream": True})
        assert status == 200, text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [None if line == "[DONE]" else json.loads(line) for line in lines]

    def socket(self) -> socket.socket:
        """Return a new connection on which nothing was sent."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def wait_until_empty(self, seconds: float = 20.0) -> None:
        """Wait until nothing is running: no places, no answers, no slots."""
        wait_for(lambda: nothing_left(self.state), seconds)


def nothing_left(state: State) -> bool:
    engine = state.backend.engine
    return not state.answers and state.admission.taken == 0 and engine.free == engine.count


def wait_for(is_so: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@contextlib.contextmanager
def serving(backend: Any, settings: Settings | None = None, *, ready: bool = True, **named: Any) -> Iterator[Live]:
    """Run a server inside the block."""
    server = Server(create_app(backend, settings), **named)
    listening = bound("127.0.0.1", 0)
    thread = threading.Thread(target=server.run_on, args=(listening,))
    thread.start()
    try:
        live = Live(server, url_of(listening))
        wait_for(lambda: server.started and (not ready or live.state.status == "ok"))
        yield live
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


class Standin:
    """Replaces `LLM`: every sequence gets token after token, at a pace and with failures of the test's choice."""

    model, dtype, device = "/some/where/standin", "fp32", hardware.describe("cpu")
    kv_dtype: str | None = None
    folder: Path | None = None
    config, tokenizer = ModelConfig(n_positions=1024), TOKENIZER

    def __init__(self, slots: int = 4, *, pause: float = 0.001, chunk: int = 1, text: str = " word"):
        self.count = self.max_batch = slots
        self.stats, self.pause, self.chunk = Stats(), pause, chunk
        self.published: Callable[[], object] = lambda: None
        self.ids = TOKENIZER.encode(text)
        self.error: WarplineError | None = None
        self.held = threading.Event()  # when set, nothing continues
        self.jobs: list[Job] = []
        self.cancelled = 0
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Standin:
        return self

    @property
    def free(self) -> int:
        return max(0, self.count - len(self.jobs))

    def start(self, jobs: list[Job]) -> None:
        with self._news:
            self.jobs += jobs
            self._news.notify()

    def cancel(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.finished:
                job.ended = job.finished = True
                self.cancelled += 1
        with self._news:
            self.jobs = [job for job in self.jobs if not job.finished]

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self.jobs or self._closed)
                if self._closed:
                    return
                running = self.jobs[: self.count]
            time.sleep(self.pause)
            if not self.held.is_set():
                for job in running:
                    self._step(job)
                self.published()
                with self._news:
                    self.jobs = [job for job in self.jobs if not job.finished]

    def _step(self, job: Job) -> None:
        if job.finished:
            return
        left = job.request.limit - job.prompt_length - len(job.tokens)
        at = len(job.tokens)
        new = [self.ids[(at + i) % len(self.ids)] for i in range(min(self.chunk, left))]
        new = [*job.request.forced[at : at + len(new)], *new][: len(new)]
        count = job.request.params.logprobs
        if count is not None:
            job.logprobs += [(-1.0, np.full(count, -1.0), np.arange(count))] * len(new)
        job.tokens += new
        cut = job.receive(new) if job.receive is not None else None
        if self.error is not None:
            job.error, job.finished = self.error, True
        elif cut is not None:
            del job.tokens[cut:], job.logprobs[cut:]
            job.finish_reason, job.finished = "stop", True
        elif len(new) == left:
            job.finish_reason, job.finished = "length", True
        if job.notify is not None:
            job.notify()


def _is_backend(standin: Standin) -> Backend:
    """Show the type checker that it has what the server needs."""
    return standin
