"""The engine that computes nothing behaves as the server expects of an engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.conftest import SMALL
from warpline.bench.serving.mock import STORY, TOKENS, Mock
from warpline.config import SamplingParams
from warpline.engine.job import Job
from warpline.engine.request import Request
from warpline.engine.text import watched
from warpline.model.tokenizer import Tokenizer


@pytest.fixture
def mock() -> Iterator[Mock]:
    made = Mock(SMALL, max_batch=3)
    yield made
    made.close()


def finished(mock: Mock, jobs: list[Job]) -> None:
    """Run the jobs; every token must have been notified."""
    ended = threading.Semaphore(0)

    def follow(job: Job) -> None:
        def told() -> None:
            if job.finished:
                ended.release()

        job.notify = told

    for job in jobs:
        follow(job)
    mock.start(jobs)
    for _ in jobs:
        assert ended.acquire(timeout=10)


def job(new: int, **params: object) -> Job:
    return Job(Request([1, 2, 3], SamplingParams(max_tokens=new, **params), 0, 0, 3 + new))  # type: ignore[arg-type]


def test_more_than_fit_are_all_finished(mock: Mock) -> None:
    jobs = [job(new) for new in (1, 2, TOKENS, TOKENS + 1, TOKENS + 2, 1000, 7, 8)]
    finished(mock, jobs)
    assert [len(one.tokens) for one in jobs] == [one.request.limit - 3 for one in jobs]
    assert {one.finish_reason for one in jobs} == {"length"}
    text = Tokenizer.gpt2().decode(jobs[5].tokens)
    assert text == (STORY * 30)[: len(text)]
    assert (mock.engine.free, mock.engine.stats.tokens) == (3, sum(len(one.tokens) for one in jobs))


def test_stop_texts_log_probabilities_and_known_tokens(mock: Mock) -> None:
    stopped, scored = job(500, stop="flowers"), job(100, logprobs=2)
    text = watched(stopped, mock.tokenizer, None)
    known = Job(Request([1], SamplingParams(logprobs=0), 0, 0, 4, forced=[7, 8, 9]))
    finished(mock, [stopped, scored, known])
    assert (stopped.finish_reason, text.text) == ("stop", STORY.partition("flowers")[0])
    assert mock.tokenizer.decode(stopped.tokens).endswith("flowers")
    assert len(scored.logprobs) == len(scored.tokens) == 100
    assert known.tokens == [7, 8, 9]


def test_cancelled_ones_leave(mock: Mock) -> None:
    jobs = [job(10**6) for _ in range(5)]
    mock.start(jobs)
    time.sleep(0.01)
    mock.engine.cancel(jobs)
    end = time.monotonic() + 5
    while mock.engine.free < 3:
        assert time.monotonic() < end
        time.sleep(0.001)
    before = [len(one.tokens) for one in jobs]
    finished(mock, [job(5)])
    assert [len(one.tokens) for one in jobs] == before


def test_the_server_alone(run: Run) -> None:  # noqa: F811
    options = ["-r", "40", "-c", "8", "--prompt", "8", "--new", "200", "--json"]
    code, out, err = run("bench", "serve", "--mock", *options)
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["rows"]
    assert (row["label"], row["completed"], row["total_output_tokens"]) == ("mock", 40, 40 * 200)
    assert row["server_us_per_token"] >= 0
    assert row["tokens_per_chunk"] > 1  # they are merged
