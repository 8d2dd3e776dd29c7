"""Which tokens count as right."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import SMALL, make_model, make_weights
from warpline.bench.oracle import Oracle
from warpline.model.weights import read_config


def test_a_token_that_is_a_little_too_unlikely_is_wrong_in_fp32_and_right_in_bf16() -> None:
    """The second likeliest token is close to the likeliest: half precision's rounding explains it, fp32's does not."""
    weights = make_weights(read_config(SMALL))
    model, oracle = make_model(weights), Oracle(weights)
    prompts = torch.randint(weights.config.vocab_size, (200, 6), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        logits = model(prompts)[:, -1]
    two = logits.topk(2)
    deficits = (two.values[:, 0] - two.values[:, 1]) / logits.std(dim=-1)
    nearest = int(deficits.argmin())
    assert 1e-4 < float(deficits[nearest]) < 0.2
    row, likeliest, second = prompts[nearest : nearest + 1], two.indices[nearest, :1], two.indices[nearest, 1:]
    assert oracle.judge(row, likeliest[None], "fp32").right
    assert not oracle.judge(row, second[None], "fp32").right
    found = oracle.judge(row, second[None], "bf16")
    assert found.right
    assert found.worst == pytest.approx(float(deficits[nearest]), abs=2e-5)  # one row and 200 round differently
    assert found.agreeing == 0
