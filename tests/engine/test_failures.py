"""A GPU that fails in the middle of a request."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import SMALL
from warpline import LLM, SamplingParams
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
