"""`warpline chat`: conversations with a model of this process and behind a URL, and the terminal around them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.conftest import SMALL
from warpline.config import SamplingParams
from warpline.engine.llm import LLM
from warpline.errors import ConfigError, WarplineError
from warpline.serve.talk import Conversation, Local, Remote, Reply, TooLong

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(SMALL, device="cpu", dtype="fp32", executor="torch", max_batch=2)
    yield made
    made.close()


class Parrot:
    """Says how much it was told, and refuses more than `context` characters."""

    described, chats = "parrot", True
    context: int | None = None

    def __init__(self, limit: int = 10_000):
        self.limit, self.asked = limit, list[Any]()

    def answer(self, messages: list[dict[str, str]], params: SamplingParams) -> Reply:
        return self.go_on("\n".join(m["content"] for m in messages), params, messages)

    def go_on(self, text: str, params: SamplingParams, told: Any = None) -> Reply:
        if len(text) > self.limit:
            raise TooLong("too long")
        self.asked.append(text if told is None else [dict(m) for m in told])
        return Reply(iter(["so", "-so", "."]), lambda: None)

    def close(self) -> None:
        pass


def test_a_conversation_is_kept_and_the_oldest_is_left_out() -> None:
    notes: list[str] = []
    parrot = Parrot(limit=60)
    talk = Conversation(parrot, GREEDY, system="be kind", note=notes.append)
    for i in range(8):
        assert "".join(talk.say(f"message number {i}")) == "so-so."
    assert parrot.asked[0] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "message number 0"},
    ]
    assert parrot.asked[1][2:] == [
        {"role": "assistant", "content": "so-so."},
        {"role": "user", "content": "message number 1"},
    ]
    assert notes
    for told in parrot.asked:  # never half an exchange, and always the system's message
        assert [m["role"] for m in told] == ["system", *(["user", "assistant"] * len(told))][: len(told)]
    last = parrot.asked[-1]
    list(talk.again())
    assert parrot.asked[-1] == last
    with pytest.raises(TooLong):
        list(talk.say("x" * 100))
    list(talk.say("short"))  # input without an answer is removed
    assert "x" * 100 not in str(parrot.asked[-1])


def test_a_text_that_two_write() -> None:
    parrot = Parrot(limit=90)
    notes: list[str] = []
    talk = Conversation(parrot, GREEDY, write=True, note=notes.append)
    list(talk.say("It was"))
    list(talk.say("And then"))
    list(talk.say(""))
    assert parrot.asked == ["It was", "It wasso-so.\nAnd then", "It wasso-so.\nAnd thenso-so."]
    for _ in range(5):
        list(talk.say("On it went."))
    assert notes
    assert parrot.asked[-1].endswith("On it went.")
    kept, parrot.limit = talk.text, -1
    with pytest.raises(TooLong):
        list(talk.say("More"))
    parrot.limit = 90
    assert talk.begun
    assert talk.text == kept
    list(talk.again())
    talk.clear()
    assert not talk.begun
    list(talk.say(""))
    assert parrot.asked[-1] == "<|endoftext|>"


def test_stopping_keeps_what_has_come() -> None:
    talk = Conversation(Parrot(), GREEDY)
    pieces = talk.say("hello")
    assert next(pieces) == "so"
    pieces.close()  # type: ignore[attr-defined]
    assert talk.text == "user: hello\nassistant: so"


def test_local_is_the_model_itself(llm: LLM) -> None:
    partner = Local(llm)
    assert not partner.chats  # no template: plain text
    talk = Conversation(partner, GREEDY)
    (expected,) = llm.generate("Hello there", GREEDY)
    assert "".join(talk.say("Hello there")) == expected.text
    assert talk.reply is not None
    assert talk.reply.tokens == 8
    free = llm.engine.free
    pieces = talk.say("go on")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 5
    while llm.engine.free < free:
        assert time.monotonic() < end
    assert Local(llm, "dialogpt").chats


def test_local_makes_room(llm: LLM) -> None:
    notes: list[str] = []
    talk = Conversation(Local(llm), SamplingParams(temperature=0, max_tokens=30), note=notes.append)
    for _ in range(8):
        list(talk.say("one two three four five six seven eight nine ten."))
    assert notes


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve a fake model that repeats its request, and breaks off when asked for an error."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps({"data": [{"id": "m", "max_model_len": 64, "chat_template": "own"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            if said == "refuse":
                error = {"error": {"message": "no such  thing", "code": "x"}}
                return self.reply(400, json.dumps(error).encode())
            events: list[Any] = [
                {"choices": [{"delta": {"content": "you said "}}]},
                {"choices": [{"delta": {"content": said}}]},
            ]
            if said == "break":
                events.append({"error": {"message": "engine died"}})
            events.append({"choices": [], "usage": {"completion_tokens": 5, "total_tokens": 9}})
            return self.reply(
                200, b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
            )

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}/v1", bodies
        made.shutdown()


def test_remote(server: tuple[str, list[dict[str, Any]]]) -> None:
    url, bodies = server
    partner = Remote(url, key="k")
    assert (partner.chats, partner.context) == (True, 64)
    talk = Conversation(partner, SamplingParams(max_tokens=7, top_k=5, seed=3, stop=("x",)))
    assert "".join(talk.say("hello")) == "you said hello"
    assert talk.reply is not None
    assert (talk.reply.tokens, talk.reply.used) == (5, 9)
    asked = bodies[0]
    assert (asked["model"], asked["max_tokens"], asked["top_k"], asked["seed"], asked["stop"]) == ("m", 7, 5, 3, ["x"])
    assert not asked.keys() & {"min_p", "repetition_penalty"}  # other servers may not know these fields
    with pytest.raises(WarplineError, match="no such thing"):
        list(talk.say("refuse"))
    with pytest.raises(WarplineError, match="engine died"):
        list(talk.say("break"))
    with pytest.raises(ConfigError, match="no address"):
        Remote("http://host:none")
    with pytest.raises(WarplineError, match="cannot be reached"):
        Remote("http://127.0.0.1:9")


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "warpline", "chat", *options]


def test_lines_that_are_piped_in(server: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    saved = tmp_path / "story.txt"
    told = f"hello\nsecond \\\nline\n/save {saved}\nlast"
    options = ["--url", server[0]]
    done = subprocess.run(command(*options), input=told, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "you said hello\nyou said second \nline\nyou said last\n"
    assert saved.read_text().startswith("user: hello\nassistant: you said hello\nuser: second")
    refused = subprocess.run(command(*options), input="refuse\n", capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [f"error: {server[0].removesuffix('/v1')}: no such thing"]


def test_a_system_message_is_for_conversations(server: tuple[str, list[dict[str, Any]]]) -> None:
    options = ["--url", server[0], "--system", "Be brief."]
    done = subprocess.run(command(*options), input="hello\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "you said hello\n"), done.stderr
    assert server[1][-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    refused = subprocess.run(command(*options, "--write"), capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stderr) == (2, "error: --system is for conversations: leave --write out\n")


@contextmanager
def terminal(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a chat in a terminal of 80 columns; yield the process and the other end of its line."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(command(*options), stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    try:
        yield process, main
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_a_terminal_of_80_columns_and_ctrl_c() -> None:
    """The model writes a long text; Ctrl-C stops the answer, the next line is answered, Ctrl-D ends."""
    endless = SMALL.replace("n_positions=96", "n_positions=50000")
    with terminal("-m", endless, "--executor", "torch", "--max-new-tokens", "40000") as (process, line):

        def wait_for(pattern: str, seconds: float = 60) -> str:
            seen, end = b"", time.monotonic() + seconds
            while not re.search(pattern, seen.decode(errors="replace"), re.DOTALL):
                assert time.monotonic() < end, seen[-2000:]
                if select.select([line], [], [], 0.1)[0]:
                    seen += os.read(line, 65536)
            return seen.decode(errors="replace")

        wait_for("› $")
        for _ in range(2):
            os.write(line, b"hello there\n")
            seen = wait_for(r"hello there\r\n([^\n]*\r\n){3}")  # it is writing
            process.send_signal(signal.SIGINT)
            seen += wait_for("stopped · .*› $")
            answer = seen.partition("hello there\r\n")[2].partition("\x1b")[0]
            assert all(cell_len(part) <= 80 for part in answer.split("\r\n") if " " in part)
        os.write(line, b"\x04")
        assert process.wait(30) == 0
