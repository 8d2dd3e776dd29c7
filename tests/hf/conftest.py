"""A small GPT-2 of transformers with weights large enough that logits differ clearly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

VOCABULARY, END = 301, 300

Make = Callable[..., Any]


def make_model(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 96, "vocab_size": VOCABULARY, "eos_token_id": END,
        "bos_token_id": END, "initializer_range": 0.2, "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**settings | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)  # a mistake with one must show
    return model.eval()


@pytest.fixture
def model() -> Any:
    return make_model()


@pytest.fixture
def ids() -> Tensor:
    return random_ids(3, 17)


def random_ids(rows: int, length: int, seed: int = 5) -> Tensor:
    return torch.randint(END, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(ids: Tensor, pads: list[int]) -> Tensor:
    """Return a mask that hides the first `pads[i]` ids of row i."""
    return (torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]).long()


@torch.no_grad()
def logits(model: Any, ids: Tensor, **keywords: Any) -> Tensor:
    result = model(input_ids=ids, **keywords).logits
    assert isinstance(result, Tensor)
    return result


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether both are equal up to the rounding of fp32 kernels with another order of sums."""
    return bool((a - b).abs().max() <= 2e-5 * b.abs().max())
