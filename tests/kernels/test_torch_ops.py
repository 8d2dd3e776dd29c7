"""The torch operators where there is no GPU: schema, fake implementations, compilation, and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warpline.config import ROUNDING
from warpline.errors import ConfigError
from warpline.kernels import torch_ops
from warpline.kernels.spec import KernelSpec
from warpline.kernels.torch_ops import OPERATORS
from warpline.kernels.verify import random_inputs

SPECS = pytest.mark.parametrize("spec", OPERATORS.values(), ids=OPERATORS)


def arguments(spec: KernelSpec, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    name = {torch.float32: "fp32", torch.float16: "fp16"}[dtype]
    return random_inputs(spec, name, spec.test_dims[2], 0, device="cpu")


def operator(spec: KernelSpec) -> Any:
    return getattr(torch.ops.warpline, spec.name).default


@SPECS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_opcheck(spec: KernelSpec, dtype: torch.dtype) -> None:
    torch.library.opcheck(operator(spec), tuple(arguments(spec, dtype)))


@SPECS
def test_usable_in_a_compiled_graph(spec: KernelSpec) -> None:
    def double(*tensors: torch.Tensor) -> Any:
        result = operator(spec)(*tensors)
        return 2 * (result[-1] if isinstance(result, tuple) else result)

    torch._dynamo.reset()  # one function compiled for every spec would reach the limit of its versions
    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    inputs = arguments(spec)
    assert torch.allclose(compiled(*inputs), double(*inputs))


@pytest.mark.parametrize("spec", [spec for spec in OPERATORS.values() if spec.numbers], ids=lambda spec: spec.name)
def test_numbers_are_passed_on(spec: KernelSpec) -> None:
    inputs, number = arguments(spec), spec.numbers[0]
    value = 1 if number.is_int else 10.0
    changed = operator(spec)(*inputs, value)
    numbers = spec.number_values(spec.dims_of([tensor.shape for tensor in inputs]), {number.name: value})
    for ours, reference in zip(
        changed if isinstance(changed, tuple) else (changed,), spec.reference(*inputs, **numbers), strict=True
    ):
        assert torch.allclose(ours, reference)
    if spec.name != "sample":  # the drawn token need not depend on it
        usual = operator(spec)(*inputs)
        last = (changed[-1], usual[-1]) if isinstance(changed, tuple) else (changed, usual)
        assert not torch.allclose(*last)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ConfigError, match="weight has columns=9"):
        torch.ops.warpline.layernorm(torch.zeros(2, 8), torch.zeros(9), torch.zeros(8))


@SPECS
def test_reference_is_what_the_model_does(spec: KernelSpec) -> None:
    """In float64 the operator's reference and a float32 run agree to float32 rounding, or that of the result."""
    inputs = arguments(spec)
    single = operator(spec)(*inputs)
    numbers = spec.number_values(spec.dims_of([tensor.shape for tensor in inputs]))
    exact = spec.reference(*torch_ops.as_floats(inputs, torch.float64), **numbers)
    for ours, reference in zip(single if isinstance(single, tuple) else (single,), exact, strict=True):
        rounding = ROUNDING["fp16"] if ours.dtype == torch.float16 else 0  # for results in half precision
        assert (ours.double() - reference).abs().max() <= (64 * 2**-24 + rounding) * reference.abs().max()
