"""The command itself: curl, signals, and the message when it cannot start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

MODEL = "random:n_layer=2,n_head=2,n_embd=32,n_positions=1024"
SERVE = [sys.executable, "-m", "warpline", "serve", "--model", MODEL, "--device", "cpu", "--executor", "torch"]


def started(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Return the process and its URL, once it takes requests."""
    process = subprocess.Popen(
        [*SERVE, "--port", "0", *options], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"at (http://\S+)", line):
            return process, found[1]
    raise AssertionError("".join(lines))


def post(body: str, more: str = "") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{more}content-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first\n\nsecond\n")
    process, url = started("--api-key-file", str(keys), "--served-model-name", "small", "--max-batch", "4")
    try:
        yield process, url
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_curl(command: tuple[subprocess.Popen[str], str]) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    _, url = command
    asked = json.dumps({"model": "small", "prompt": "A frog", "max_tokens": 5, "seed": 1, "stream": True})
    options = ["-sS", "-N", "-H", "authorization: Bearer second", "-d", asked, f"{url}/v1/completions"]
    said = subprocess.run([curl, *options], capture_output=True, text=True, timeout=30, check=True).stdout
    assert said.endswith("data: [DONE]\n\n")
    refused = subprocess.run([curl, "-sS", f"{url}/v1/models"], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(refused.stdout)["error"]["code"] == "invalid_api_key"


def test_sigterm_drains(command: tuple[subprocess.Popen[str], str]) -> None:
    process, url = command
    port = int(url.rpartition(":")[2])
    body = json.dumps({"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True})
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(post(body, "authorization: Bearer first\r\n"))
        text = sock.recv(1 << 16)
        process.send_signal(signal.SIGTERM)
        while part := sock.recv(1 << 16):
            text += part
    assert b'"finish_reason":"length"' in text
    assert b"data: [DONE]" in text
    assert process.wait(30) == 0


def test_the_second_signal_ends() -> None:
    process, url = started()
    port = int(url.rpartition(":")[2])
    body = json.dumps({"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 5})
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(post(body))
            sock.recv(1 << 16)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            assert time.monotonic() - began < 20
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "99999"], "port must be between"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        (["--api-key-file", "/nowhere"], "cannot read the API keys"),
        (["--max-queue", "-1"], "max_queue"),
        (["--log-level", "loud"], "unknown log level 'loud'"),
        (["--model", "nosuch", "--port", "0"], "unknown model 'nosuch'"),
        (["--chat-template", "/nowhere", "--port", "0"], "cannot read the chat template"),
    ],
)
def test_what_cannot_be_started(options: list[str], says: str) -> None:
    done = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") <= 2
    assert "Traceback" not in done.stderr
