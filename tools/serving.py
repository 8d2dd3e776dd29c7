"""Measures what disconnecting clients cost the server, on this machine, one part at a time:

    python -m tools.serving aborts|disconnects --save results

`warpline bench serve` measures the speed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.scale import wait_until_healthy
from tools.simulated import here
from warpline import LLM, SamplingParams, hardware
from warpline.bench.rows import append, provenance
from warpline.bench.serving.figures import percentile
from warpline.bench.serving.process import Server

Row = dict[str, Any]
MODEL = "stories"
#: Aborted requests that are measured, and those before for warm-up; concurrent clients; disconnects that are timed.
ABORTS, BEFORE, CLIENTS, TIMED = 10_000, 60_000, 32, 200


def request(body: dict[str, Any]) -> bytes:
    """Return the bytes of a request."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def leave(port: int, rng: random.Random) -> None:
    """Ask for a long text, and disconnect at a random moment: while the request is sent, waits, or is answered."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": "Once upon a time", "max_tokens": 500, "n": rng.choice([1, 1, 2]), "stream": rng.random() < 0.7}
    writer.write(request(body)[: None if rng.random() < 0.95 else 60])
    await asyncio.sleep(rng.choice([0.0, 0.002, 0.02, 0.05]) * rng.random())
    writer.transport.abort()


async def fill(port: int) -> None:
    """Generate as many texts at once as there are slots, until the context ends."""

    async def write() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request({"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True}))
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"a text was not written: {status.decode().strip()}")
        await reader.readuntil(b"\r\n\r\n")
        await reader.read(1)
        writer.close()

    await asyncio.gather(*(write() for _ in range(CLIENTS)))


async def leave_often(port: int, count: int) -> None:
    """Let `count` clients leave, some at a time."""
    left = iter(range(count))

    async def client(number: int) -> None:
        rng = random.Random(number)
        for _ in left:
            await leave(port, rng)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


def aborts() -> Row:
    """Measure the resident memory of an idle server before and after many aborts. First every slot of the KV cache is
    written to the end, because memory counts only once it is touched, and oneDNN gets prompts of nearly every total
    length, because it keeps code for each."""
    with Server(("-m", "warpline", "serve", "--model", MODEL, "--device", "cpu"), patience=60) as server:
        wait_until_healthy(server)
        asyncio.run(fill(server.port))
        memory = []
        for count in (BEFORE, ABORTS, ABORTS):
            began = time.perf_counter()
            asyncio.run(leave_often(server.port, count))
            seconds = time.perf_counter() - began
            wait_until_empty(server.port)
            memory.append(round(server.resident_mb(), 2))
    grown = [round(b - a, 2) for a, b in itertools.pairwise(memory)]
    shape = {"kind": "aborts", "aborts": ABORTS, "before": BEFORE, "clients": CLIENTS}
    return shape | {"resident_mb": memory, "grown_mb": grown, "seconds": round(seconds, 2)}


def wait_until_empty(port: int) -> None:
    end = time.monotonic() + 60
    while any(metric(port, name) for name in ("num_requests_running", "num_requests_waiting")):
        if time.monotonic() > end:
            raise SystemExit("something is left of requests whose clients have gone")
        time.sleep(0.1)
    time.sleep(1)


def metric(port: int, name: str) -> float:
    """Return a gauge of the server."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"warpline:{name}{{")]
    return float(line.split()[-1])


def disconnects() -> Row:
    """Time from a client's disconnect to its free slot, alone and beside seven others. The server is in this process,
    so that the slot can be read directly."""
    llm = LLM(MODEL, device="cpu", dtype="fp32")
    llm.generate([0], SamplingParams(max_tokens=2))
    found: Row = {"kind": "disconnects", "count": TIMED}
    with here(llm) as url:
        port = int(url.rpartition(":")[2])
        for others in (0, 7):
            company = [connected(port, 900) for _ in range(others)]
            times = sorted(1e3 * left(llm, port) for _ in range(TIMED))
            for connection in company:
                connection.close()
            wait_for(lambda: llm.engine.free == llm.engine.count)
            found |= {f"beside_{others}_p{share}_ms": round(percentile(times, share), 3) for share in (50, 99)}
            found[f"beside_{others}_mean_ms"] = round(statistics.fmean(times), 3)
    llm.close()
    return found


def connected(port: int, tokens: int) -> socket.socket:
    """Return the connection of a running stream."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    connection.sendall(request(body))
    connection.recv(64)
    if tokens > 500:  # these stay open, so they must be read
        threading.Thread(target=lambda: [*iter(lambda: read(connection), b"")], daemon=True).start()
    return connection


def read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def left(llm: LLM, port: int) -> float:
    """Return the seconds until the slot of a client that disconnects is free."""
    connection = connected(port, 500)
    free = llm.engine.free
    began = time.perf_counter()
    connection.close()
    wait_for(lambda: llm.engine.free > free)
    return time.perf_counter() - began


def wait_for(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.0002)


def main() -> None:
    parts: dict[str, Callable[[], Row]] = {"aborts": aborts, "disconnects": disconnects}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    row = parts[given.part]()
    made = provenance() | {"device": hardware.describe("cpu").name, "label": "warpline", "model": MODEL}
    if given.save is not None:
        append(given.save, "serve", [made | row])
    print(json.dumps(row))


if __name__ == "__main__":
    main()
