"""Tokens are merged by time, first tokens and ends are not, and threads call each other rarely."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

from warpline.serve.hub import REST, Hub


class Reader:
    waiting = False

    def __init__(self) -> None:
        self.times: list[float] = []

    def arrived(self) -> None:
        self.times.append(time.perf_counter())


def test_merged_by_time_and_nothing_is_lost() -> None:
    async def main() -> tuple[Reader, int, float]:
        loop, reader, calls = asyncio.get_running_loop(), Reader(), 0
        hub = Hub(loop, merge=0.02)
        plain = loop.call_soon_threadsafe

        def counted(*args: object) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return plain(*args)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[assignment,method-assign]

        def tell() -> None:
            for _ in range(200):
                hub.tell(reader, urgent=False)
                hub.wake()
                time.sleep(0.001)

        began = time.perf_counter()
        await asyncio.to_thread(tell)
        took = time.perf_counter() - began
        await asyncio.sleep(0.1)
        assert not reader.waiting
        return reader, calls, took

    reader, calls, took = asyncio.run(main())
    assert 2 <= len(reader.times) <= took / 0.02 + 3
    assert calls <= len(reader.times) + 1  # one of them is to_thread's own


def test_a_crowd_that_takes_long_to_serve_is_served_less_often() -> None:
    """The listeners' work counts too, such as sending."""

    class Slow(Reader):
        def arrived(self) -> None:
            super().arrived()
            asyncio.get_running_loop().call_soon(time.sleep, 0.02)

    async def main() -> list[float]:
        reader = Slow()
        hub = Hub(asyncio.get_running_loop(), merge=0.001)
        for _ in range(120):
            hub.tell(reader, urgent=False)
            hub.wake()
            await asyncio.sleep(0.002)
        return reader.times

    times = asyncio.run(main())
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert len(pauses) > 1
    assert min(pauses) >= 0.02 * (1 + REST) - 0.002


def test_urgent_news_do_not_wait_for_others() -> None:
    async def main() -> None:
        slow, quick = Reader(), Reader()
        hub = Hub(asyncio.get_running_loop(), merge=30.0)
        hub.tell(slow, urgent=False)
        await asyncio.sleep(0.05)
        assert not slow.times  # no thread has called the loop
        hub.wake()
        await asyncio.sleep(0.05)
        assert len(slow.times) == 1
        hub.tell(slow, urgent=False)
        hub.tell(quick, urgent=True)
        hub.wake()
        await asyncio.sleep(0.05)
        assert len(quick.times) == 1
        assert len(slow.times) == 1
        hub.tell(slow, urgent=True)
        hub.wake()
        await asyncio.sleep(0.05)
        assert len(slow.times) == 2

    asyncio.run(main())


def test_many_threads() -> None:
    async def main() -> None:
        hub = Hub(asyncio.get_running_loop(), merge=0.001)
        readers = [Reader() for _ in range(4)]
        last = [0.0] * 4

        def tell(number: int) -> None:
            for _ in range(300):
                last[number] = time.perf_counter()
                hub.tell(readers[number], urgent=number == 0)
                hub.wake()

        threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert all(reader.times[-1] > end for reader, end in zip(readers, last, strict=True))

    asyncio.run(main())


def test_a_closed_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    hub = Hub(loop)
    loop.close()
    hub.tell(Reader(), urgent=True)
    hub.wake()
