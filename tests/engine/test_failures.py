"""A GPU that fails during a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.conftest import SMALL
from warpline import LLM, SamplingParams
from warpline.engine.slots import Slots
from warpline.errors import DeviceError


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough free memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for"), "start a new one"),
    ],
)
def test_a_gpu_that_fails_is_one_line_and_the_next_request_works(
    monkeypatch: pytest.MonkeyPatch, failure: RuntimeError, told: str
) -> None:
    llm = LLM(SMALL, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate("A frog", params)[0].text

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor, "decode", fail)
        with pytest.raises(DeviceError, match=told) as caught:
            llm.generate("A frog", params)
    assert "\n" not in str(caught.value)
    assert llm.generate("A frog", params)[0].text == expected


def test_a_launch_that_ended_itself_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The persistent kernel's watchdog does this; here the kernels executor simulates it."""
    llm = LLM(SMALL, device="cpu", executor="kernels")
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate("A frog", params)[0].text
    decode = llm.executor.decode

    def hang(slots: Slots, lanes: Sequence[int], n: int) -> None:
        decode(slots, lanes, n)
        slots.fault.fill_(1)

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor, "decode", hang)
        with pytest.raises(DeviceError, match="ended itself"):
            llm.generate(["A frog", "A dog"], params)
    assert llm.generate("A frog", params)[0].text == expected
    assert llm.engine.free == llm.max_batch


def test_an_interrupt_loses_what_ran_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(SMALL, device="cpu", max_batch=1)
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = [c.text for c in llm.generate(["A frog", "A dog"], params)]
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    running, waiting = llm.submit("A frog", params), llm.submit("A dog", params)
    llm.engine.step()  # its first token

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor, "decode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    with pytest.raises(DeviceError, match="interrupted: KeyboardInterrupt"):
        running.result(timeout=0)
    while llm.engine.step():
        pass
    assert waiting.result(timeout=0).text == expected[1]
