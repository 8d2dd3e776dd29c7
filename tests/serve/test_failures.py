"""Running requests end properly, whatever happens: clients that leave, engines that fail, readers that do not read."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import pytest

from tests.serve.live import Live, Standin, serving, wait_for
from warpline.errors import DeviceError, ModelError
from warpline.serve import state as state_module
from warpline.serve.state import Settings

ASK = {"prompt": "A frog", "max_tokens": 1000}


def begin(live: Live, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request without reading its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["queued", "running", "before a token"])
def test_a_client_that_leaves_is_forgotten_once(streamed: bool, phase: str) -> None:
    standin = Standin(slots=2)
    if phase == "before a token":
        standin.held.set()
    with serving(standin) as live:
        others = [begin(live, ASK | {"stream": streamed}) for _ in range(2 if phase == "queued" else 0)]
        wait_for(lambda: len(standin.jobs) == len(others))
        one = begin(live, ASK | {"stream": streamed, "n": 2})
        wait_for(lambda: len(standin.jobs) == len(others) + 2)
        if phase == "running":
            wait_for(lambda: all(job.tokens for job in standin.jobs))
        one.close()
        wait_for(lambda: len(standin.jobs) == len(others))
        assert standin.cancelled == 2
        for other in others:
            other.close()
        live.wait_until_empty()
        assert standin.cancelled == 2 + len(others)
        assert live.state.metrics.finished["abort"] == standin.cancelled


def test_finished_answers_are_not_cancelled() -> None:
    standin = Standin()
    with serving(standin) as live:
        for streamed in (False, True):
            assert live.request("/v1/completions", ASK | {"max_tokens": 3, "stream": streamed})[0] == 200
        live.wait_until_empty()
    assert standin.cancelled == 0


def test_overload_is_refused_before_anything_is_done() -> None:
    standin = Standin(slots=2, pause=0.002)
    with serving(standin, Settings(max_queue=3)) as live:
        standin.held.set()
        connections = [begin(live, ASK | {"max_tokens": 4}) for _ in range(5)]
        wait_for(lambda: live.state.admission.taken == 5)
        began = time.perf_counter()
        status, said, headers = live.request("/v1/completions", ASK)
        assert time.perf_counter() - began < 2
        assert status == 429
        assert said["error"]["type"] == "rate_limit_error"
        assert 1 <= int(headers["retry-after"]) <= 60
        assert live.request("/v1/completions", ASK | {"n": 2})[0] == 429
        assert live.request("/v1/completions", ASK | {"n": 6})[0] == 400
        assert live.request("/health")[0] == 200
        text = live.request("/metrics")[1]
        assert 'warpline:num_requests_waiting{model_name="standin"} 3' in text
        assert 'warpline:requests_refused_total{model_name="standin"} 2' in text
        standin.held.clear()
        assert all(connection.getresponse().status == 200 for connection in connections)
        for connection in connections:
            connection.close()
        live.wait_until_empty()


def test_a_bad_request_takes_no_place(live: Live) -> None:
    for body in ({"prompt": ""}, {"prompt": [10**6]}, {"prompt": "x", "temperature": 10**6}):
        assert live.request("/v1/completions", body)[0] == 400
    assert live.state.admission.taken == 0


def test_an_engine_that_fails_says_so_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "PROBE", 0.05)
    standin = Standin()
    with serving(standin) as live:
        standin.error = DeviceError("the GPU failed while generating with /some/where/standin")
        for body in (ASK, ASK | {"stream": True}):
            status, said, _ = live.request("/v1/completions", body)
            assert status == 503
            assert "the GPU failed" in said["error"]["message"]
            assert "/some/where" not in json.dumps(said)
        status, said, _ = live.request("/health")
        assert status == 503
        assert said["status"] == "failed"
        assert "/some/where" not in json.dumps(said)
        standin.error = None
        wait_for(lambda: live.request("/health")[0] == 200)
        assert live.request("/v1/completions", ASK | {"max_tokens": 2})[0] == 200
        live.wait_until_empty()


def test_a_broken_sequence_does_not_condemn_the_engine() -> None:
    standin = Standin()
    with serving(standin) as live:
        standin.error = ModelError("/some/where/standin computed logits that are no numbers")
        status, said, _ = live.request("/v1/completions", ASK)
        assert (status, said["error"]["message"]) == (500, "standin computed logits that are no numbers")
        assert live.request("/health")[0] == 200


def test_a_failure_behind_the_first_token_is_an_event() -> None:
    standin = Standin()
    with serving(standin) as live:
        connection = begin(live, ASK | {"stream": True})
        answer = connection.getresponse()
        answer.read(10)
        standin.error = DeviceError("the GPU failed")
        rest = answer.read().decode()
        connection.close()
        *_, error, done, end = rest.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert (done, end) == ("data: [DONE]", "")
        standin.error = None


def test_loading() -> None:
    loaded = threading.Event()

    def load() -> Standin:
        loaded.wait(30)
        return Standin()

    with serving(load, ready=False) as live:
        for path, body in (("/health", None), ("/v1/models", None), ("/v1/completions", ASK), ("/metrics", None)):
            status, said, headers = live.request(path, body)
            assert status == 503
            assert headers["retry-after"] == "1"
            assert "loading" in json.dumps(said)
        assert live.request("/")[0] == 200
        loaded.set()
        wait_for(lambda: live.request("/health")[0] == 200)


def test_shutting_down_waits_for_what_runs() -> None:
    standin = Standin(pause=0.005)
    with serving(standin) as live:
        connection = begin(live, ASK | {"stream": True, "max_tokens": 60})
        answer = connection.getresponse()
        live.server.should_exit = True
        text = answer.read().decode()
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text
        connection.close()


def test_shutting_down_waits_no_longer_than_it_may() -> None:
    standin = Standin(slots=1)
    began = time.monotonic()
    with serving(standin, shutdown_timeout=1) as live:
        connection = begin(live, ASK | {"stream": True})
        answer = connection.getresponse()
        answer.read(10)
        standin.held.set()
        live.server.should_exit = True
        text = answer.read().decode()
        assert "shutting down" in text.rsplit("data: ", 2)[-2]
        connection.close()
    assert standin.cancelled == 1
    assert time.monotonic() - began < 20


def test_a_reader_of_a_whole_answer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the server the answer is complete; it is still in memory."""
    monkeypatch.setattr(state_module, "SLOW_READER", 0.2)
    body = json.dumps({"prompt": "a " * 500_000, "return_token_strs": True}).encode()
    asked = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    with serving(Standin()) as live, live.socket() as connection:
        connection.sendall(asked)
        wait_for(lambda: live.state.metrics.answers.get(("/tokenize", 200)))
        wait_for(lambda: not live.server.server_state.connections)


def test_a_reader_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences still finish, and its connection is closed."""
    monkeypatch.setattr(state_module, "SLOW_READER", 0.4)
    standin = Standin(slots=64, chunk=100)
    body = json.dumps(ASK | {"stream": True, "stream_interval": 1, "n": 64})  # more than any buffer holds
    asked = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    with serving(standin) as live, live.socket() as connection:
        connection.sendall(asked.encode())
        wait_for(lambda: live.state.metrics.finished["length"] == 64)
        live.wait_until_empty()
        wait_for(lambda: not live.server.server_state.connections)
