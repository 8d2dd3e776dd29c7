"""`Stream`, the result of `LLM.stream`: pieces of text as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from warpline.engine.job import Job
from warpline.engine.text import Completion, Text

if TYPE_CHECKING:
    from warpline.engine.llm import LLM


class Stream:
    """Pieces of text as they are generated; `completion` is set when the text is complete."""

    def __init__(self, llm: LLM, job: Job, text: Text, given: str | None):
        self.completion: Completion | None = None
        self._pieces = self._run(llm, job, text, given)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation now; the slot is freed."""
        self._pieces.close()

    def _run(self, llm: LLM, job: Job, text: Text, given: str | None) -> Generator[str, None, None]:
        llm.executor.ready()  # so that no reader waits in the middle of a sentence
        llm.engine.submit([job])
        try:
            while not job.finished:
                llm.engine.run(_changes(job, text))
                if job.error is not None:
                    raise job.error
                if not job.finished and (piece := text.release(ended=False)):
                    yield piece
            self.completion = llm._complete(job, given, text.finish())
            if piece := text.release(ended=True):
                yield piece
        finally:
            llm.engine.cancel([job])  # one that is dropped leaves nothing


def _changes(job: Job, text: Text) -> Callable[[], bool]:
    return lambda: job.finished or text.has_more
