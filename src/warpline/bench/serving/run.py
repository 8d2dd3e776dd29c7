"""A load is sent to a server; rows come back."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from warpline.bench.serving.answers import read
from warpline.bench.serving.client import Connection, Raw, Target, connect, once
from warpline.bench.serving.figures import Row, figures
from warpline.bench.serving.load import PATHS, Load
from warpline.errors import ConfigError

T = TypeVar("T")
#: Seconds between two looks at a server that is not ready.
PAUSE = 0.1


def run(work: Coroutine[Any, Any, T]) -> T:
    """On the fastest event loop there is."""
    try:
        import httptools  # noqa: F401 - the client needs it
        import uvloop
    except ImportError:
        work.close()
        raise ConfigError("measuring servers needs httptools and uvloop: pip install 'warpline[serve]'") from None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def ready(target: Target, seconds: float, alive: Callable[[], None] = lambda: None) -> str | None:
    """Wait until the server answers; the name of its first model, if it says one. `alive` raises when waiting is of no
    use."""
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
    """Send the load. `before` is called when the warm-up is over."""
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
        gc.disable()  # a pause of the client's would count as one of the server's
        before()
        cpu, began = time.process_time(), time.perf_counter()
        found = await _send(target, requests, load.arrivals(), load.concurrency, timeout, pool, advance)
        duration, cpu = max(raw.ended for raw in found) - began, time.process_time() - cpu
    finally:
        gc.enable()
        for connection in pool:
            connection.close()
    return figures([read(raw) for raw in found], load, duration, cpu, goals)


def _require(warm: list[Raw]) -> None:
    """A server that refuses the first request will refuse the others."""
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
    """All requests, each when it is due and a place is free."""
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
