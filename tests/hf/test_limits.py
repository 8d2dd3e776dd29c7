"""The largest change that a patch may make, and which prompts run on our kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from warpline.hf import patching, probe
from warpline.hf.generate import NotOursError, _unpadded
from warpline.hf.probe import Seen


def test_no_rounding_explains_more_than_half_of_the_spread() -> None:
    values = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert Seen(values).allowed(torch.float32, 12) < Seen(values).spread / 2
    values[0, 0] = 1e6  # one large logit makes rounding large, but must not excuse more
    assert Seen(values).allowed(torch.bfloat16, 48) == pytest.approx(Seen(values).spread / 2)


@pytest.mark.parametrize("values", [(1.0, 3.0), (3.0, 1.0)])
def test_the_larger_of_both_differences_counts(monkeypatch: pytest.MonkeyPatch, values: tuple[float, float]) -> None:
    ways: list[bool] = []
    shared = SimpleNamespace(everywhere=None)

    def look(asked: Any, base: Any) -> Seen:
        ways.append(shared.everywhere)
        return Seen(torch.tensor([values[len(ways) - 1]]))

    monkeypatch.setattr(probe, "look", look)
    assert patching._difference(Seen(torch.tensor([0.0])), None, None, cast(Any, shared)) == 3.0
    assert ways == [True, False]


def test_an_end_inside_a_prompt_is_no_pad_where_both_are_one_token() -> None:
    ids = torch.tensor([[5, 9, 5, 7]])
    (row,) = _unpadded(ids, None, pad=5, eos=5)
    assert np.array_equal(row, [5, 9, 5, 7])
    with pytest.raises(NotOursError, match="pads without an attention_mask"):
        _unpadded(ids, None, pad=5, eos=1)
