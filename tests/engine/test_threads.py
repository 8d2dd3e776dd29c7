"""Many threads on one `LLM`, several in one process, and handles: correct results, no errors, no hangs."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.engine.arrivals import random_params, random_prompt
from tests.engine.test_joining import TINY, make
from warpline import LLM, SamplingParams
from warpline.errors import ConfigError, DeviceError

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def in_threads(count: int, work: Callable[[int], object], timeout: float = 240) -> None:
    """Run it in this many threads at once; raise what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, i) for i in range(count)]:
            future.result(timeout=timeout)


def work_on(llm: LLM, thread: int, requests: int) -> list[tuple[list[int], SamplingParams, tuple[int, ...]]]:
    """Generate, stream and submit in turn; return requests and results."""
    rng = random.Random(thread)
    found: list[tuple[list[int], SamplingParams, tuple[int, ...]]] = []
    while len(found) < requests:
        prompts = [random_prompt(rng, 300, 60) for _ in range(rng.randint(1, 4))]
        params = [random_params(rng, longest=12) for _ in prompts]
        way = rng.randrange(3)
        if way == 0:
            done = llm.generate(prompts, params)
        elif way == 1:
            done = [handle.result(timeout=200) for handle in map(llm.submit, prompts, params)]
        else:
            done = []
            for prompt, its in zip(prompts, params, strict=True):
                stream = llm.stream(prompt, its)
                text = "".join(stream)
                assert stream.completion is not None
                assert text == stream.completion.text
                done.append(stream.completion)
        found += [(p, its, c.token_ids) for p, its, c in zip(prompts, params, done, strict=True)]
    return found


@pytest.mark.parametrize("executor", ["cpu", "torch"])
def test_eight_threads_on_one_llm(executor: str) -> None:
    llm, alone, found = make(executor, 6), make("torch"), []
    in_threads(8, lambda thread: found.extend(work_on(llm, thread, 200)))
    assert len(found) >= 1600
    assert llm.engine.free == 6
    for prompt, params, tokens in random.Random(1).sample(found, 200):
        assert alone.generate(prompt, params)[0].token_ids == tokens


def test_three_llms_in_three_threads() -> None:
    llms, found = [make(name) for name in ("cpu", "torch", "cpu")], []
    in_threads(3, lambda i: found.extend(work_on(llms[i], i, 60)))
    alone = make("torch")
    for prompt, params, tokens in found:
        assert alone.generate(prompt, params)[0].token_ids == tokens


def test_a_handle_is_worked_on_while_nothing_waits_for_it() -> None:
    llm = make("cpu")
    handle = llm.submit([1, 2], LONG)
    deadline = time.monotonic() + 60
    while not handle.finished and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handle.finished
    (expected,) = llm.generate([1, 2], LONG)
    assert handle.token_ids == handle.result().token_ids == expected.token_ids
    assert "".join(handle) == expected.text
    assert handle.result().prompt_token_ids == (1, 2)


def test_handles_in_an_event_loop() -> None:
    llm = make("cpu", 3)
    prompts = [[i + 1] for i in range(7)]

    async def read(prompt: list[int]) -> str:
        return "".join([piece async for piece in llm.submit(prompt, LONG)])

    async def leave(prompt: list[int]) -> None:
        pieces = llm.submit(prompt, LONG).__aiter__()
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]

    async def all_of_them() -> list[str]:
        texts = await asyncio.gather(*map(read, prompts), leave([9]), leave([8]))
        return [text for text in texts if text is not None]

    assert asyncio.run(all_of_them()) == [c.text for c in make("torch").generate(prompts, LONG)]
    while not llm.engine.idle:
        time.sleep(0.01)
    assert llm.engine.free == 3


def test_a_handle_that_takes_too_long() -> None:
    llm = make("cpu")
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    handle = llm.submit([1], LONG)
    with pytest.raises(TimeoutError, match=r"no result within 0\.01 s"):
        handle.result(timeout=0.01)
    with pytest.raises(ConfigError, match="n > 1"):
        llm.submit([1], SamplingParams(n=2))


def test_an_error_reaches_everybody_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("torch", 2)
    (expected,) = llm.generate([5], LONG)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: something\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor, "decode", fail)
        handles = [llm.submit([i], LONG) for i in (5, 6)]
        for handle in handles:
            with pytest.raises(DeviceError, match="something"):
                handle.result(timeout=60)
    assert llm.generate([5], LONG)[0].token_ids == expected.token_ids
    assert llm.engine.free == 2


def test_closing_ends_the_thread_and_frees_the_slots() -> None:
    llm = LLM(TINY, device="cpu", executor="torch")
    handle = llm.submit([1], LONG)
    llm.close()
    assert handle.result().finish_reason == "length"
    assert llm.engine._slots is None
    assert llm._worker._thread is None or not llm._worker._thread.is_alive()
    for late in (llm.submit, llm.stream, llm.generate):
        with pytest.raises(ConfigError, match="closed"):
            late([1], LONG)
    assert llm.engine.idle


def test_a_listener_that_has_gone_harms_no_other() -> None:
    """Its event loop is closed while it waits; the other listeners miss nothing."""
    llm = make("torch", 2)
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    first, second = llm.submit([1], LONG), llm.submit([2], LONG)
    loop = asyncio.new_event_loop()
    pieces = first.__aiter__()

    async def begin() -> None:
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.01)
        waiting.cancel()

    first._listeners.append(lambda: loop.call_soon_threadsafe(lambda: None))
    loop.run_until_complete(begin())
    loop.close()
    while llm.engine.step():
        pass
    assert second.result(timeout=0).token_ids == make("torch").generate([2], LONG)[0].token_ids
    assert llm.engine.free == 2


def test_memory_that_is_not_there_is_said_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("torch", 2)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor, "allocate", fail)
        handles = [llm.submit([i], LONG) for i in range(5)]
        for handle in handles:
            with pytest.raises(DeviceError, match="not enough free memory for a KV cache of 2 × 129"):
                handle.result(timeout=60)
    assert len(llm.generate([1], LONG)[0].token_ids) == 100


def test_an_admission_that_fails_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("torch", 2)
    llm.generate([1], LONG)
    slots = llm.engine._slots
    assert slots is not None

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: no memory")

    with monkeypatch.context() as patch:
        patch.setattr(slots.crossing, "admit", fail)
        for _ in range(5):
            with pytest.raises(DeviceError, match="no memory"):
                llm.generate([1], LONG)
    assert llm.engine.free == 2
    assert len(llm.generate([[1], [2], [3]], LONG)) == 3


def test_timings_do_not_change_any_more() -> None:
    llm = make("cpu")
    text = llm.generate([1], LONG)[0].text
    stopped = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, stop=text[6:8])
    (completion,) = llm.generate([1], stopped)
    before = completion.timings.seconds, completion.timings.decode_steps
    time.sleep(0.2)
    llm.generate([2], LONG)
    assert (completion.timings.seconds, completion.timings.decode_steps) == before
    stream = llm.stream([1], LONG)
    for _ in stream:
        time.sleep(0.05)  # a slow reader
    assert stream.completion is not None
    assert stream.completion.timings.seconds < 0.2 < 0.05 * len(stream.completion.text)


def test_python_may_end_while_the_engine_is_at_work() -> None:
    """A thread inside torch would crash at the end of Python."""
    code = """
from warpline import LLM, SamplingParams
llm = LLM("random:n_layer=4,n_head=4,n_embd=256,n_positions=512", device="cpu", executor="torch")
handles = [llm.submit([1] * 300, SamplingParams(max_tokens=200, ignore_eos=True)) for _ in range(4)]
next(iter(handles[0]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
