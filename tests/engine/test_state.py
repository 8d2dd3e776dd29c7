"""What a state takes in: prompts from the host, from the device, or both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from warpline.config import ModelConfig, SamplingParams
from warpline.engine.state import Request, State

CONFIG = ModelConfig(vocab_size=97, n_positions=32, n_embd=16, n_layer=1, n_head=2)


def begun(prompts: list[Any], **params: Any) -> State:
    state = State(CONFIG, 4, 32, device=torch.device("cpu"), dtype=torch.float32)
    state.tokens.fill_(5)
    chosen = SamplingParams(max_tokens=3, **params)
    state.begin([Request(prompt, chosen, 7, i, len(prompt) + 3, forced=(1, 2)) for i, prompt in enumerate(prompts)])
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
