"""Bytes that no client should send: the server survives, answers where it can, and its memory is bounded."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.serve.live import Live, Standin, serving, wait_for
from warpline.serve import connection, routes
from warpline.serve.state import Settings

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def open_server() -> Iterator[Live]:
    with serving(Standin(), Settings(max_body=1 << 20)) as live:
        yield live
        live.wait_until_empty()
        assert not live.server.server_state.tasks


def talk(live: Live, *parts: bytes) -> bytes:
    """Return all bytes until the server closes the connection."""
    with live.socket() as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has closed the connection
        found = b""
        try:
            while part := sock.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
        return found


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_garbage(open_server: Live, garbage: bytes) -> None:
    assert talk(open_server, garbage).startswith(b"HTTP/1.1 400")
    assert open_server.request("/health")[0] == 200


def test_a_declared_gigabyte_is_refused_unread(open_server: Live) -> None:
    began = time.monotonic()
    answer = talk(open_server, POST + b"content-length: 1073741824\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert time.monotonic() - began < 5
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_an_undeclared_body_is_cut(open_server: Live) -> None:
    def resident() -> int:
        text = open_server.request("/metrics")[1]
        return int(text.split("\nprocess_resident_memory_bytes ")[1].splitlines()[0])

    before = resident()
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    answer = talk(open_server, POST + b"transfer-encoding: chunked\r\n\r\n", *[piece] * 1600)
    assert b" 413 " in answer or not answer  # the answer may be lost when a connection is reset
    assert resident() - before < 30 << 20


def test_header_bombs(open_server: Live) -> None:
    for bomb in (b"x: " + b"y" * (8 << 20), b"".join(b"h%d: v\r\n" % i for i in range(20_000)), b"z" * (4 << 20)):
        answer = talk(
            open_server,
            b"GET /health HTTP/1.1\r\nhost: x\r\n",
            *(bomb[i : i + 65536] for i in range(0, len(bomb), 65536)),
        )
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) or not answer
    assert talk(open_server, b"GET /" + b"a" * (2 << 20)).startswith(b"HTTP/1.1 431")
    assert open_server.request("/health")[0] == 200


def test_slow_loris(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.5)
    with serving(Standin()) as live:
        socks = [live.socket() for _ in range(50)]
        for number, sock in enumerate(socks):
            sock.sendall([b"", b"GET /hea", POST, POST + b"content-length: 10\r\n\r\n{"][number % 4])
        wait_for(lambda: not live.server.server_state.connections, 20)
        answers = [sock.recv(1 << 16) for sock in socks]
        for number, answer in enumerate(answers):
            assert answer.startswith([b"", b"HTTP/1.1 408", b"HTTP/1.1 408", b"HTTP/1.1 408"][number % 4]), answer
        for sock in socks:
            sock.close()
        # and on a connection that was used before
        with live.socket() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
            sock.sendall(b"GET /hea")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_what_comes_early_does_not_disturb_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    body = b'{"prompt": "x", "max_tokens": 400, "stream": true}'
    with serving(Standin(pause=0.002)) as live, live.socket() as sock:
        sock.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /hea")
        found = b""
        while b"[DONE]" not in found:
            part = sock.recv(1 << 16)
            assert part, found[-300:]
            found += part
        assert b"HTTP/1.1 408" not in found.partition(b"[DONE]")[0]


def test_half_requests(open_server: Live) -> None:
    """Bodies that end too early, and connections that end at any point."""
    body = b'{"prompt": "x", "max_tokens": 900, "stream": true}'
    whole = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    for end in range(1, len(whole), 7):
        with open_server.socket() as sock:
            sock.sendall(whole[:end])
    open_server.wait_until_empty()


def test_nonsense_bodies(open_server: Live) -> None:
    bodies = [
        b"", b"null", b"[]", b"{", b'"x"', b"[" * 100_000, b'{"prompt":' + b"[" * 50_000, b"\xff\xfe",
        b'{"prompt": "\\ud800"}', b'{"prompt": [1, "a"]}', b'{"prompt": [[]]}', b'{"prompt": []}',
        b'{"prompt": [true]}', b'{"prompt": [1.5]}',
    ]  # fmt: skip
    settings = [
        b'"temperature": NaN', b'"temperature": 1e999', b'"n": 99999999999', b'"max_tokens": 1e3',
        b'"logprobs": "many"', b'"logit_bias": {"a": 1}', b'"stop": %s' % json.dumps(["s"] * 10_000).encode(),
        b'"seed": -9223372036854775809', b'"top_p": 0', b'"metadata": 3', b'"user": {"a": {}}',
    ]  # fmt: skip
    for body in (*bodies, *(b'{"prompt": "x", %s}' % one for one in settings)):
        status, said, _ = open_server.request("/v1/completions", body)
        assert status == 400, body[:60]
        assert set(said["error"]) == {"message", "type", "param", "code"}
        assert "\n" not in said["error"]["message"]


def test_pipelined_and_kept_alive(open_server: Live) -> None:
    one = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    with open_server.socket() as sock:
        sock.sendall(one * 5)
        found = b""
        while found.count(b"HTTP/1.1 200") < 5 or not found.endswith(b"}"):
            found += sock.recv(1 << 16)
    assert found.count(b'"version"') == 5


def test_small_packets_are_not_held_back(open_server: Live) -> None:
    """Nagle's algorithm would hold events back for tens of milliseconds."""
    with open_server.socket() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        sock.recv(1 << 16)
        (mine,) = [c for c in open_server.server.server_state.connections if c.transport is not None]
        theirs = mine.transport.get_extra_info("socket")
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/v2", 404)]
)
def test_wrong_places(open_server: Live, method: str, path: str, status: int) -> None:
    answer = talk(
        open_server, f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
    )
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert b'{"error":' in answer
