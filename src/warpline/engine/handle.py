"""A submitted request as its caller sees it: tokens and text as they come, the result, and cancellation."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from warpline.engine.engine import Engine
from warpline.engine.job import Job
from warpline.engine.text import Completion, Text
from warpline.errors import ConfigError

#: Seconds that the worker thread waits for more work before it ends.
PATIENCE = 1.0


class Handle:
    """The result of `LLM.submit`. Iterate over it with `for` or `async for` for pieces of text; `result` returns the
    whole.

    The engine's worker thread generates it whether or not a reader waits.
    """

    def __init__(self, engine: Engine, job: Job, text: Text, complete: Callable[[Job], Completion]):
        self._engine, self._job, self._text, self._complete = engine, job, text, complete
        self._completion: Completion | None = None
        self._arrived = threading.Condition()
        self._listeners: list[Callable[[], object]] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._job.tokens)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self._job.finished

    def cancel(self) -> None:
        """Cancel the request. Its slot is free within a turn; the tokens so far stay, with "cancelled" as finish
        reason."""
        self._engine.cancel([self._job])
        self.told()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the completion and return it; TimeoutError after `timeout` seconds."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._job.finished, timeout):
                raise TimeoutError(f"no result within {timeout:g} s")
        return self._made()

    def __iter__(self) -> Iterator[str]:
        """Yield pieces of text as they come."""
        while True:
            with self._arrived:
                self._arrived.wait_for(self._has_news)
            ended, piece = self._piece()
            if piece:
                yield piece
            if ended:
                return

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield pieces of text without blocking the event loop."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._listeners.append(wake)
        try:
            while True:
                arrived.clear()
                ended, piece = self._piece()
                if piece:
                    yield piece
                if ended:
                    return
                if not self._has_news():
                    await arrived.wait()
        finally:
            if wake in self._listeners:
                self._listeners.remove(wake)
            if not self._job.finished:  # the reader has stopped
                self.cancel()

    def told(self) -> None:
        """Wake readers; the engine calls it when something has come."""
        with self._arrived:
            self._arrived.notify_all()
        for listener in list(self._listeners):
            try:
                listener()
            except RuntimeError:  # its event loop is closed
                self._listeners.remove(listener)

    def _has_news(self) -> bool:
        return self._job.finished or self._text.has_more

    def _piece(self) -> tuple[bool, str]:
        """Return whether nothing more comes, which is read first, and the text that is there."""
        ended = self._job.finished
        if ended:
            self._made()
        return ended, self._text.release(ended=ended)

    def _made(self) -> Completion:
        if self._job.error is not None:
            raise self._job.error
        if self._completion is None:
            self._completion = self._complete(self._job)
        return self._completion


class Worker:
    """A thread that drives an engine while handles are unfinished, and ends after `PATIENCE` seconds without work; the
    next handle starts another."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock, self._work = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def require_open(self) -> None:
        """Raise an error if the LLM is closed."""
        if self._closed:
            raise ConfigError("this LLM is closed: make a new one")

    def wake(self) -> None:
        """Make the thread run; any thread may call it."""
        with self._lock:
            self._work.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="warpline-engine", daemon=True)
                self._thread.start()
                atexit.register(self._leave)  # a thread inside torch crashes the interpreter at exit

    def close(self) -> None:
        """End the thread when its work is done."""
        with self._lock:
            self._closed, thread = True, self._thread
            self._work.set()
        if thread is not None:
            thread.join()

    def _leave(self) -> None:
        self._engine.cancel_all()
        self.close()

    def _serve(self) -> None:
        while True:
            self._work.clear()
            with contextlib.suppress(Exception):  # every failed sequence has the error and raises it to its reader
                self._engine.run(lambda: self._engine.idle)
            if not self._engine.idle:
                continue
            self._work.wait(PATIENCE)
            with self._lock:
                if self._closed or not self._work.is_set():
                    self._thread = None
                    atexit.unregister(self._leave)
                    return
