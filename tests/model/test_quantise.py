"""Weights as int8 codes: their accuracy, and what has no codes."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import SMALL, make_weights
from warpline.config import ModelConfig
from warpline.errors import ModelError
from warpline.model.quantise import SCALE, dequantised, quantised
from warpline.model.weights import load

CPU = torch.device("cpu")


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_what_has_no_codes_is_named(odd: float) -> None:
    weights = make_weights(ModelConfig(n_layer=1, n_head=2, n_embd=32, n_positions=16, vocab_size=50))
    weights.tensors["h.0.mlp.c_fc.weight"][3, 5] = odd
    with pytest.raises(ModelError, match=r"h\.0\.mlp\.c_fc\.weight holds infinite numbers or NaN"):
        quantised(weights)


def test_weights_say_what_they_are() -> None:
    plain = load(SMALL, dtype="fp16")
    small = quantised(plain)
    assert (plain.is_quantised, small.is_quantised) == (False, True)
    assert (plain.activations, small.activations) == (torch.float16, torch.float32)
    assert (small.device, small.room(3, 5).dtype, small.room(3, 5).shape) == (CPU, torch.float32, (3, 5))
    again = dequantised(small, torch.float32)
    assert again.tensors.keys() == plain.tensors.keys()
    wte, scale = again.tensors["wte.weight"], small.tensors["wte.weight" + SCALE]
    assert (wte - plain.tensors["wte.weight"].float()).abs().le(0.5001 * scale[:, None]).all()
    assert quantised(small) is small
