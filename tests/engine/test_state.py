"""What a state takes in: prompts from the host, from the device, or both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from warpline.config import ModelConfig, SamplingParams
from warpline.engine.state import ALL_TOKENS, Request, State

CONFIG = ModelConfig(vocab_size=97, n_positions=32, n_embd=16, n_layer=1, n_head=2)


def begun(prompts: list[Any], **params: Any) -> State:
    state = State(CONFIG, 4, 32, device=torch.device("cpu"), dtype=torch.float32)
    state.tokens.fill_(5)
    chosen = SamplingParams(max_tokens=3, **params)
    state.begin([Request(prompt, chosen, 7, i, len(prompt) + 3, forced=(1, 2)) for i, prompt in enumerate(prompts)])
    state.restart()
    return state


@pytest.mark.parametrize("lengths", [(6,), (6, 6, 6), (6, 1, 9, 4)])
@pytest.mark.parametrize("which", ["all", "every other"])
def test_prompts_on_the_device_are_those_on_the_host(lengths: tuple[int, ...], which: str) -> None:
    rows = [np.random.default_rng(i).integers(CONFIG.vocab_size, size=n) for i, n in enumerate(lengths)]
    there = [torch.tensor(row) if which == "all" or i % 2 else row for i, row in enumerate(rows)]
    here, moved = begun(rows, temperature=0.7), begun(there, temperature=0.7)
    for name in ("tokens", "length", "known", "limit", "noise"):
        assert torch.equal(getattr(here, name)[: len(rows)], getattr(moved, name)[: len(rows)]), name
    for i, row in enumerate(rows):
        assert moved.tokens[i, : len(row) + 3].tolist() == [*row, 1, 2, 0]


def test_a_smaller_batch_leaves_nothing_of_the_last() -> None:
    state = State(CONFIG, 4, 32, device=torch.device("cpu"), dtype=torch.float32)
    old = SamplingParams(max_tokens=9, min_tokens=2, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0)
    state.begin([Request([1, 2, 3], old, 0, i, 12) for i in range(4)])
    state.restart()
    state.done[:], state.broken[:] = True, True
    new = SamplingParams(temperature=0, top_p=1.0, max_tokens=4, ignore_eos=True)
    state.begin([Request(torch.tensor([7, 8]), new, 0, 0, 6), Request(torch.tensor([9]), old, 0, 0, 10)])
    state.restart()
    assert state.tokens[0, :2].tolist() == [7, 8]
    assert state.tokens[1, :1].tolist() == [9]
    expected: dict[str, list[float]] = {
        "length": [2, 1], "known": [2, 1], "limit": [6, 10], "min_length": [2, 3], "top_k": [ALL_TOKENS, 3],
        "temperature": [0, 0.8], "top_p": [1, 0.5], "min_p": [0, 0.1], "penalty": [1, 2], "stops_at_eos": [False, True],
        "done": [False, False, True, True], "broken": [False, False, False, False],
    }  # fmt: skip
    for name, values in expected.items():
        found = getattr(state, name)
        assert found[: len(values)].tolist() == pytest.approx(values), name
    assert state.needs.end == "drawn"
    assert (state.batch, state.longest) == (2, 2)


def test_a_batch_like_the_last_one_begins_anew() -> None:
    """Its fields do not travel again, and yet nothing of what became of them is left."""
    state = State(CONFIG, 2, 32, device=torch.device("cpu"), dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=3)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        state.begin([Request(torch.tensor(tokens), params, 0, 0, 6)])
        state.restart()
        assert state.tokens[0, :3].tolist() == tokens
        assert (state.length.tolist(), state.done.tolist()) == ([3, 1], [False, True])
        assert not state.broken.any()
        state.length += 2
        state.done[:], state.broken[:] = True, True


def test_a_batch_that_was_refused_leaves_nothing_behind() -> None:
    state = State(CONFIG, 2, 32, device=torch.device("cpu"), dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=3)
    fine, other = Request([1, 2, 3], params, 0, 0, 6), Request(["?"] * 5, params, 0, 0, 9)  # type: ignore[list-item]
    state.begin([fine])
    with pytest.raises(ValueError, match="invalid literal"):
        state.begin([other])
    state.begin([fine])
    state.restart()
    assert (state.length.tolist(), state.limit.tolist(), state.tokens[0, :3].tolist()) == ([3, 1], [6, 1], [1, 2, 3])
