"""A local Ray for all tests of a file, and the command that serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

MODEL = "random:n_layer=2,n_head=2,n_embd=32,n_positions=512"
ENGINE: dict[str, Any] = {"model": MODEL, "device": "cpu", "dtype": "fp32", "max_batch": 4}


#: Ray triggers its own deprecation warnings, and leaves files and sockets open until the process ends.
RAYS_OWN = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/ray/" in str(item.path):
            for one in (*RAYS_OWN, "ignore::pytest.PytestUnraisableExceptionWarning"):
                item.add_marker(pytest.mark.filterwarnings(one))


class Served:
    """`warpline serve --replicas …` while it runs."""

    def __init__(self, process: subprocess.Popen[str], url: str):
        self.process, self.url = process, url

    def ask(self, body: dict[str, Any], path: str = "/v1/completions", timeout: float = 60.0) -> tuple[int, Any, Any]:
        """Return status, JSON and headers."""
        asked = Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urlopen(asked, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read()), answer.headers
        except HTTPError as error:
            with error:
                raw = error.read()
            is_json = (error.headers.get("content-type") or "").startswith("application/json")
            return error.code, json.loads(raw) if is_json else raw.decode(errors="replace"), error.headers

    def replicas(self) -> list[int]:
        """Return the processes of the replicas."""
        found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        lines = [line.split(None, 1) for line in found.splitlines()]
        return [int(pid) for pid, what in lines if what.startswith("ray::ServeReplica:warpline")]

    def stop(self, which: signal.Signals = signal.SIGTERM) -> str:
        """End the server; return its output."""
        self.process.send_signal(which)
        try:
            _, said = self.process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return said


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "warpline", "serve", "--model", MODEL, "--device", "cpu", "--dtype", "fp32"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1", *options], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at (http://\S+)", line):
                served = Served(process, found[1])
                break
        else:
            raise AssertionError("".join(lines))
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        process.stderr.close()


def wait_for(is_so: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
