"""Sends a load to a server and returns rows."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from warpline import hardware
from warpline.bench.rows import provenance
from warpline.bench.serving.answers import read
from warpline.bench.serving.client import Connection, Raw, Target, connect, once
from warpline.bench.serving.figures import Row, figures, refusals
from warpline.bench.serving.load import PATHS, Load
from warpline.bench.serving.process import Server
from warpline.errors import ConfigError

T = TypeVar("T")
#: Seconds between two attempts to reach a server that is not ready.
PAUSE = 0.1


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop, the fastest event loop available."""
    try:
        import httptools  # noqa: F401 - the client needs it
        import uvloop
    except ImportError:
        work.close()
        raise ConfigError("measuring servers needs httptools and uvloop: pip install 'warpline[serve]'") from None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def ready(target: Target, seconds: float, alive: Callable[[], None] = lambda: None) -> str | None:
    """Wait until the server answers; return the name of its first model, if it names one. `alive` raises if there is no
    point in waiting."""
    end = time.monotonic() + seconds
    while True:
        alive()
        try:
            answer = await once(target, "GET", "/v1/models", timeout=max(1.0, end - time.monotonic()))
        except ConnectionError as error:
            why = str(error)
        else:
            if answer.status in (401, 403):
                raise ConfigError(f"{target.url} wants another API key: see --api-key-file")
            if answer.error is None and answer.status not in (502, 503, 504):
                return _first_model(answer)
            why = f"{target.url} is not ready: {answer.error or f'status {answer.status}'}"
        if time.monotonic() > end:
            raise ConfigError(f"{why} (after {seconds:g} s; is the server running?)")
        await asyncio.sleep(PAUSE)


def _first_model(answer: Raw) -> str | None:
    try:
        return str(json.loads(b"".join(piece for _, piece in answer.pieces))["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a server is asked, independent of the load."""

    model: str | None = None  # None: the server's first model
    label: str | None = None  # the server's name in rows; None: its address
    warmups: int | None = None  # None: one for each concurrent request
    timeout: float = 300.0  # seconds for an answer
    patience: float = 60.0  # seconds for the server to be ready


def measured(
    target: Target,
    loads: Sequence[Load],
    asking: Asking,
    goals: dict[str, float],
    *,
    server: Server | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> list[Row]:
    """Return a row for each load. With `server`, its CPU time is measured as well."""
    first = run(ready(target, asking.patience, server.require_alive if server is not None else lambda: None))
    model = asking.model or first
    if model is None:
        raise ConfigError(f"{target.url} does not say which models it has: name one with --model")
    label = asking.label or f"{target.address.host}:{target.address.port}"
    rows = []
    for load in loads:
        warmups = min(load.concurrency or 8, load.requests) if asking.warmups is None else asking.warmups
        spent = 0.0

        def begin() -> None:
            nonlocal spent
            spent = server.cpu_seconds() if server is not None else 0.0

        work = measure(
            target, load, model, warmups=warmups, timeout=asking.timeout, goals=goals, before=begin, advance=advance
        )
        row = {"label": label, "model": model, **load.described(), **run(work)}
        if server is not None:
            cpu = server.cpu_seconds() - spent
            row["server_us_per_token"] = round(1e6 * cpu / max(1, row["total_output_tokens"]), 3)
        rows.append(row)
    made = provenance() | {"device": hardware.describe("cpu").name}  # of this machine, where the client runs
    return [made | row for row in rows]


async def measure(
    target: Target,
    load: Load,
    model: str,
    *,
    warmups: int,
    timeout: float,
    goals: dict[str, float],
    before: Callable[[], None] = lambda: None,
    advance: Callable[[float], None] = lambda amount: None,
) -> Row:
    """Send the load; return its row. `before` is called after the warm-up."""
    path = PATHS[load.api]
    pool: list[Connection] = []
    try:
        if warmups:
            again = Load(
                requests=warmups, prompt=load.prompt, new=min(load.new, 16), seed=load.seed + 1,
                context=load.context, api=load.api, ids=load.ids, omit=load.omit, body=load.body,
            )  # fmt: skip
            requests = [target.request("POST", path, body) for body in again.bodies(model)]
            _require(await _send(target, requests, again.arrivals(), load.concurrency, timeout, pool))
        requests = [target.request("POST", path, body) for body in load.bodies(model)]
        gc.collect()
        gc.disable()  # a pause of the client would count as one of the server
        before()
        cpu, began = time.process_time(), time.perf_counter()
        found = await _send(target, requests, load.arrivals(), load.concurrency, timeout, pool, advance)
        duration, cpu = max(raw.ended for raw in found) - began, time.process_time() - cpu
    finally:
        gc.enable()
        for connection in pool:
            connection.close()
    return figures([read(raw) for raw in found], load, duration, cpu, goals) | refusals(found)


def _require(warm: list[Raw]) -> None:
    """Raise if the server refused every request of the warm-up: it would refuse the others too."""
    failed = [found for found in map(read, warm) if isinstance(found, str)]
    if len(failed) == len(warm):
        raise ConfigError(f"the server refused every request of the warm-up: {failed[0]}")


async def _send(
    target: Target,
    requests: Iterable[bytes],
    arrivals: list[float],
    concurrency: int | None,
    timeout: float,
    pool: list[Connection],
    advance: Callable[[float], None] = lambda amount: None,
) -> list[Raw]:
    """Send all requests, each when it is due and fewer than `concurrency` are running; return the answers."""
    places = asyncio.Semaphore(concurrency or len(arrivals))
    began = time.perf_counter()

    async def one(request: bytes, due: float) -> Raw:
        if (wait := began + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        async with places:
            connection = pool.pop() if pool else None
            if connection is None or not connection.open:
                sent = time.perf_counter()
                try:
                    connection = await connect(target)
                except ConnectionError as error:
                    return Raw(sent, ended=time.perf_counter(), error=str(error))
            answer = await connection.ask(request, timeout)
            if connection.open:
                pool.append(connection)
            advance(1)
            return answer

    return await asyncio.gather(*(one(request, due) for request, due in zip(requests, arrivals, strict=True)))
