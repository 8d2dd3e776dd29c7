"""`warpline bench serve` against a server with scripted answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import socketserver
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
from warpline.bench.serving import figures, report
from warpline.bench.serving.answers import Answer, read
from warpline.bench.serving.client import Raw, Target, once
from warpline.bench.serving.load import Load
from warpline.errors import ConfigError
from warpline.model.tokenizer import Tokenizer
from warpline.serve.address import address_of

pytest.importorskip("uvloop")

#: Writes an answer to a body; returns True to close the connection.
Reply = Callable[[dict[str, Any], Callable[[bytes], object]], bool]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def target(url: str) -> Target:
    return Target(address_of(url))


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def streamed(body: dict[str, Any], write: Callable[[bytes], object]) -> bool:
    """Answer with two tokens at a time, 10 ms apart, and usage."""
    write(HEAD)
    for _ in range(body["max_tokens"] // 2):
        write(chunk(event(choices=[{"index": 0, "text": " a b"}])))
        time.sleep(0.01)
    write(chunk(event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": body["max_tokens"]})))
    write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    return False


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a server on a free port, and the bodies it got."""
    bodies: list[dict[str, Any]] = []

    class Handler(socketserver.StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            while line := self.rfile.readline():
                length = 0
                while (header := self.rfile.readline().strip().lower()) != b"":
                    if header.startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                if line.startswith(b"GET /v1/models"):
                    found = b'{"data":[{"id":"m"}]}'
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(found) + found)
                    continue
                body = json.loads(self.rfile.read(length))
                bodies.append(body)
                if reply(body, self.wfile.write):
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        finally:
            server.shutdown()


def test_rows_say_what_the_server_did(run: Run, tmp_path: Path) -> None:  # noqa: F811
    options = ["-r", "6", "-c", "2,3", "--prompt", "20", "--new", "8", "--goodput", "ttft:9,e2el:1"]
    with serving(streamed) as (url, bodies):
        code, out, err = run("bench", "serve", "--url", url + "/v1", *options, "--save", str(tmp_path), "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["rows"]
    assert [row["max_concurrency"] for row in rows] == [2, 3]
    for row in rows:
        assert (row["completed"], row["failed"], row["counted"]) == (6, 0, ["usage"])
        assert (row["total_output_tokens"], row["total_input_tokens"], row["tokens_per_chunk"]) == (48, 42, 2)
        # Three gaps of 10 ms for seven tokens; a busy machine sees single events late.
        assert 2 < row["median_tpot_ms"] < 20
        assert 5 <= row["median_itl_ms"] < 60
        assert row["median_ttft_ms"] < row["median_e2el_ms"]
        assert row["median_e2el_ms"] >= 40
        assert row["request_goodput"] == 0  # no whole answer in 1 ms
        assert row["output_throughput"] == pytest.approx(48 / row["duration"], rel=1e-3)
    (saved,) = tmp_path.rglob("serve.jsonl")
    assert [json.loads(line) for line in saved.read_text().splitlines()] == rows
    assert len(bodies) == 2 * 6 + 2 + 3  # warm-ups
    assert len({body["prompt"] for body in bodies}) == 6 + 3  # the same for every load
    assert {len(Tokenizer.gpt2().encode(body["prompt"])) for body in bodies} == {20}


def test_the_last_line_is_one_object_with_a_figure_for_each_load(run: Run) -> None:  # noqa: F811
    with serving(streamed) as (url, _):
        code, out, _ = run("bench", "serve", "--url", url + "/v1", "-r", "3", "-c", "1,2", "--new-tokens", "8")
    assert code == 0
    last = json.loads(out.splitlines()[-1])
    assert last["rows"] == 2
    assert all(len(last[name]) == 2 and min(last[name]) > 0 for name in ("output_throughput", "median_ttft_ms"))


def test_a_goal_is_met_up_to_its_limit() -> None:
    """For gaps between chunks the longest counts; an answer of one token meets every goal for later tokens."""
    one = Answer(prompt_tokens=3, tokens=3, ttft=0.25, gaps=(0.125, 0.5), whole=1.0, counted="usage")
    met = {"ttft:250": 1, "ttft:249": 0, "itl:500": 1, "itl:499": 0, "ttft:250,e2el:1000": 1, "ttft:250,e2el:999": 0}
    for text, count in met.items():
        row = figures.figures([one], Load(requests=1), 1.0, 0.0, figures.goals(text))
        assert row["request_goodput"] == count, text
    short = replace(one, tokens=1, gaps=())
    assert figures.figures([short], Load(requests=1), 1.0, 0.0, figures.goals("tpot:1"))["request_goodput"] == 1


@pytest.mark.parametrize(("share", "noted"), [(report.BUSY, False), (report.BUSY + 0.01, True)])
def test_a_busy_client_is_noted(share: float, noted: bool) -> None:
    row: dict[str, Any] = {
        "client_cpu_share": share,
        "request_rate": None,
        "max_concurrency": 8,
        "counted": ["usage"],
        "errors": {},
    }
    assert bool(report.notes(row | {"client_cpu_share": share})) is noted


def test_refusals_have_their_own_time() -> None:
    refused = [Raw(1.0, 429, ended=1.0 + ms / 1e3) for ms in (4, 2, 3)]
    assert figures.refusals([*refused, Raw(1.0, 200, ended=9.0)]) == {
        "refused": 3, "p50_refusal_ms": 3.0, "p90_refusal_ms": 3.8, "p99_refusal_ms": 3.98,
    }  # fmt: skip
    assert figures.refusals([Raw(1.0, 200, ended=9.0)]) == {}


def test_a_server_is_held_against_the_library(run: Run) -> None:  # noqa: F811
    tiny = "random:n_layer=1,n_head=2,n_embd=16,n_positions=64"
    options = ["-m", tiny, "--device", "cpu", "-r", "3", "-c", "1,2", "--prompt", "5", "--new", "6", "--context", "64"]
    code, out, err = run("bench", "serve", "--library", *options, "--json")
    assert (code, err) == (0, "")
    one, two = json.loads(out)["rows"]
    for row in (one, two):
        share = row["output_throughput"] / row["library_output_throughput"]
        assert row["share_of_library"] == pytest.approx(share, rel=1e-3)
    assert one["added_p50_ttft_ms"] == pytest.approx(one["p50_ttft_ms"] - one["library_p50_ttft_ms"], abs=1e-3)
    assert "added_p50_ttft_ms" not in two


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (b'HTTP/1.1 429 No\r\nContent-Length: 33\r\n\r\n{"error":{"message":"slow down"}} ', "429: slow down"),
        (HEAD + chunk(event(error={"message": "engine died"})) + b"0\r\n\r\n", "in the stream: engine died"),
        (HEAD + chunk(b"data: {]\n\n") + b"0\r\n\r\n", "an event is no JSON"),
        (HEAD + chunk(event(choices=[])) + b"0\r\n\r\n", "no text came"),
        (HEAD + chunk(event(choices=[{"text": "a"}])), "the server hung up"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is no HTTP"),
    ],
)
def test_what_goes_wrong_is_said(written: bytes, problem: str) -> None:
    def broken(body: dict[str, Any], write: Callable[[bytes], object]) -> bool:
        write(written)
        return True

    with serving(broken) as (url, _):
        found = read(asyncio.run(once(target(url), "POST", "/v1/completions", b"{}")))
    assert isinstance(found, str)
    assert problem in found


def test_answer_without_a_length_ends_with_the_connection() -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + event(choices=[{"delta": {"content": "a"}}]))

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        found = read(asyncio.run(once(target(f"127.0.0.1:{server.server_address[1]}"), "GET", "/")))
    assert isinstance(found, Answer)
    assert (found.tokens, found.counted) == (1, "chunks")


@given(cuts=st.lists(st.integers(0, 400), max_size=12), crlf=st.booleans())
def test_events_may_be_cut_anywhere(cuts: list[int], crlf: bool) -> None:
    whole = b": a comment\n\n" + b"".join(event(choices=[{"text": c, "token_ids": [1, 2]}]) for c in "abä")
    whole += b"data: [DONE]\n\n"
    whole = whole.replace(b"\n", b"\r\n") if crlf else whole
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [(float(i), whole[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges), 1)]
    found = read(Raw(0.0, 200, pieces, float(len(pieces))))
    assert isinstance(found, Answer)
    assert (found.tokens, found.counted, len(found.gaps)) == (6, "token ids", 2)
    ends = [whole.index(b"\n", whole.index(f'"text": {json.dumps(c)}'.encode())) + 1 for c in "abä"]
    arrived = [next(float(i) for i, edge in enumerate(edges[1:], 1) if edge >= end) for end in ends]
    assert found.ttft == arrived[0]
    assert sum(found.gaps) == arrived[2] - arrived[0]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert figures.percentile(sorted(values), share) == pytest.approx(np.percentile(values, share), rel=1e-9, abs=1e-9)


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    for burstiness in (0.3, 1.0, 4.0):
        load = Load(requests=20_000, rate=50, burstiness=burstiness, prompt=1, new=1)
        times = load.arrivals()
        gaps = [b - a for a, b in itertools.pairwise(times)]
        # A gap's deviation is 1/√burstiness of the mean: five of the mean's own, and of the deviation's.
        assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=5 / (burstiness * len(gaps)) ** 0.5)
        assert statistics.stdev(gaps) * 50 == pytest.approx(burstiness**-0.5, rel=0.1)
        assert times == load.arrivals()


def test_lengths_are_seeded_and_fit() -> None:
    load = Load(requests=500, prompt=100, new=200, spread=0.8, context=400)
    found = load.lengths()
    assert found == load.lengths()
    assert found != Load(requests=500, prompt=100, new=200, spread=0.8, context=400, seed=1).lengths()
    assert all(prompt + new <= 400 for prompt, new in found)
    assert len(set(found)) > 400
    with pytest.raises(ConfigError, match="--context"):
        Load(prompt=1000, new=100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "x", "--mock"], "give one of them"),
        (["--mock", "--dtype", "fp32"], "leave them out"),
        (["--mock", "--library"], "that is started here"),
        (["--url", "ftp://x"], "is no address of a server"),
        (["--url", "http://127.0.0.1:9", "--ready", "0"], "cannot be reached"),
        (["--concurrency", "none"], "takes numbers above 0"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--rate", "-1"], "takes numbers above 0"),
        (["--goodput", "tftt:1"], "did you mean 'ttft'"),
        (["--goodput", "ttft:fast"], "milliseconds"),
        (["--body", "[1]"], "a JSON object"),
        (["--api", "responses"], "unknown api"),
        (["--prompt", "2000"], "--context"),
        (["--burstiness", "0"], "above 0"),
        (["--api-key-file", "/none"], "cannot read /none"),
        (["--chart", "/none/a.png"], "there is no folder"),
    ],
)
def test_bad_input_is_one_line(run: Run, words: list[str], message: str) -> None:  # noqa: F811
    code, _, err = run("bench", "serve", *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
