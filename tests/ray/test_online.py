"""`warpline serve --replicas`: OpenAI's API over several models, with a replica that dies, and when all are full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import pytest

from tests.ray.conftest import ENGINE, MODEL, Served, serving, wait_for
from warpline import LLM, SamplingParams


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("--replicas", "2", "--max-batch", "4", "--max-queue", "4") as found:
        yield found


def test_texts_are_those_of_the_library_whichever_replica_answers(served: Served) -> None:
    llm = LLM(**ENGINE, threads=1)
    params = SamplingParams(max_tokens=12, seed=3, temperature=1.0, top_p=1.0, ignore_eos=True)
    text = llm.generate("A frog", params)[0].text
    body = {"prompt": "A frog", "max_tokens": 12, "seed": 3, "ignore_eos": True}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: served.ask(body), range(12)))
    assert {status for status, *_ in found} == {200}
    assert {answer["choices"][0]["text"] for _, answer, _ in found} == {text}


def test_streams_models_health_and_errors(served: Served) -> None:
    with urlopen(served.url + "/v1/models", timeout=30) as answer:
        assert json.load(answer)["data"][0]["id"] == MODEL
    with urlopen(served.url + "/health", timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}
    body = json.dumps({"prompt": "A frog", "max_tokens": 8, "stream": True}).encode()
    with urlopen(served.url + "/v1/completions", body, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.read().endswith(b"data: [DONE]\n\n")
    status, said, _ = served.ask({"prompt": "A frog", "max_tokenz": 8})
    assert status == 400
    assert "max_tokens" in said["error"]["message"]


def test_too_many_are_refused_with_429(served: Served) -> None:
    """Two replicas of four slots and four places each: of forty at once most are refused, in OpenAI's shape."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda _: served.ask(body), range(40)))
    answered = [one for one in found if one[0] == 200]
    refused = [one for one in found if one[0] == 429]
    assert len(answered) + len(refused) == 40
    assert len(answered) >= 8
    assert refused
    for _, said, headers in refused:
        assert said["error"]["type"] == "rate_limit_error"
        assert int(headers["retry-after"]) >= 1


def test_a_killed_replica(served: Served) -> None:
    """Every request has an answer or an error in time, the other replica continues, and a new one starts."""
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
    stop, found = threading.Event(), list[tuple[float, int]]()

    def client() -> None:
        while not stop.is_set():
            began = time.monotonic()
            try:
                status: int = served.ask(body, timeout=30)[0]
            except OSError:  # the connection was closed, which its client can see
                status = 0
            found.append((time.monotonic() - began, status))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for one in clients:
        one.start()
    time.sleep(1.0)
    before = served.replicas()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: len(served.replicas()) == 2 and before[0] not in served.replicas(), 60)
    wait_for(lambda: _both_answer(served), 60)
    stop.set()
    for one in clients:
        one.join()
    failed = [status for _, status in found if status != 200]
    assert len(failed) <= 8  # about two were running there, and some arrived before the proxy knew
    assert max(seconds for seconds, _ in found) < 30
    assert sum(status == 200 for _, status in found) > 8
    assert [status for _, status in found[-4:]] == [200] * 4


def _both_answer(served: Served) -> bool:
    """Metrics belong to one replica: two different ones show two replicas."""
    seen = set()
    for _ in range(20):
        try:
            with urlopen(served.url + "/v1/models", timeout=5) as answer:
                seen.add(json.load(answer)["data"][0]["created"])
        except OSError:
            return False
    return len(seen) == 2


def test_sigterm_drains(served: Served) -> None:
    """Last in this file: running requests finish, and nothing of Ray remains."""
    answers: list[Any] = []
    body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True}
    client = threading.Thread(target=lambda: answers.append(served.ask(body)))
    client.start()
    time.sleep(0.3)
    served.stop()
    client.join()
    assert served.process.returncode == 0
    (answer,) = answers
    assert answer[0] == 200
    assert answer[1]["usage"]["completion_tokens"] == 450
    wait_for(lambda: not served.replicas(), 10)


def test_autoscaling_adds_a_replica() -> None:
    with serving("--replicas", "auto", "--max-batch", "2") as served:
        assert len(served.replicas()) == 1
        stop = threading.Event()

        def client() -> None:
            while not stop.is_set():
                served.ask({"prompt": "x", "max_tokens": 300, "ignore_eos": True})

        clients = [threading.Thread(target=client) for _ in range(8)]
        for one in clients:
            one.start()
        try:
            wait_for(lambda: len(served.replicas()) >= 2, 90)
        finally:
            stop.set()
            for one in clients:
                one.join()


def test_the_config_file_of_the_examples() -> None:
    """Built as `serve run` builds it."""
    import yaml  # type: ignore[import-untyped]

    from tests.test_examples import EXAMPLES

    (app,) = yaml.safe_load((EXAMPLES / "serve.yaml").read_text())["applications"]
    assert app["import_path"] == "warpline.scale.online:build"
    from warpline.scale.online import build

    made = build({**app["args"], "device": "cpu"})
    assert made._bound_deployment.name == "warpline"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--replicas", "9", "--threads", "1"), "9 replica(s) of 1 CPU(s) need 9"),
        (("--replicas", "1", "--device", "cuda"), "1 replica(s) of 1 GPU(s) need 1, and the cluster has 0"),
        (("--replicas", "1", "--ray-address", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
        (("--replicas", "1", "--model", "no-such-model-here"), "no-such-model-here"),
        (("--replicas", "some"), "--replicas takes a number, or auto"),
        (("--ray-address", "auto"), "--ray-address is for --replicas"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(options: tuple[str, ...], why: str) -> None:
    command = [sys.executable, "-m", "warpline", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert why in lines[0]
    assert "Traceback" not in done.stderr
