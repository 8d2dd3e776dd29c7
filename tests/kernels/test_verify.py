"""The judge of kernels: right results pass, and every kind of error is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from warpline.kernels.catalog import CATALOG, find
from warpline.kernels.launch import TORCH_TYPES
from warpline.kernels.spec import KernelSpec
from warpline.kernels.verify import Trial


def computed(trial: Trial) -> list[Tensor]:
    """Compute the reference in float32, rounded to the storage type, as a kernel would."""
    floats = [t.float() if t.is_floating_point() else t for t in trial.inputs]
    results = trial.spec.reference(*floats, **trial.spec.number_values(trial.dims))
    kinds = [TORCH_TYPES[buffer.element(trial.dtype)] for buffer in trial.spec.results]
    return [result.to(kind) for result, kind in zip(results, kinds, strict=True)]


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_what_is_right_passes(spec: KernelSpec) -> None:
    dtype = "fp16" if "fp16" in spec.dtypes else "fp32"
    trial = Trial(spec, dtype, spec.test_dims[1], seed=1, device="cpu")
    assert trial.fault(computed(trial)) is None


def test_a_wrong_value_is_named() -> None:
    trial = Trial(find("layernorm"), "fp16", {"rows": 5, "columns": 64}, seed=2, device="cpu")
    (y,) = computed(trial)
    y[3, 7] += 0.1
    assert "y is off by" in (trial.fault([y]) or "")
    y[3, 7] = torch.nan
    assert trial.fault([y]) == "y is unwritten or not finite"


def test_a_wrong_choice_is_named() -> None:
    trial = Trial(find("head_argmax"), "fp32", {"rows": 2, "outputs": 100, "inputs": 64}, seed=3, device="cpu")
    token, logit = computed(trial)
    assert trial.fault([(token + 1) % 100, logit]) == "token is not the largest"
    assert trial.fault([token * 0 - 1, logit]) == "token is unwritten or out of range"


def test_a_wrong_count_is_named() -> None:
    trial = Trial(
        find("append_token"), "fp32", {"rows": 3, "slots": 5, "capacity": 20, "vocab": 30}, seed=4, device="cpu"
    )
    tokens, length, *others = computed(trial)
    assert trial.fault([tokens, length + 1, *others]) == "length differs"
