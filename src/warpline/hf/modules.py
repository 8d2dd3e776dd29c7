"""The leaf modules, MLP and LayerNorm. Blocks and models stay: their signatures change between versions."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpline.hf.gate import Forward, Shared, is_worth_it
from warpline.kernels import torch_ops

#: The import registers the operators.
OPERATORS = torch_ops.OPERATORS


class MLP(Forward):
    """First product, bias and GELU in one pass, second product; Conv1D's [in, out] matrices are used as they are.

    On a GPU the library's product has bias and GELU in its epilogue: 16,384 rows of gpt2 in float16 take 130 µs on an
    H200, and a plain product followed by our kernel 176. Ours is for fast_math, which the library lacks.
    """

    def __init__(self, module: nn.Module, shared: Shared):
        super().__init__(module, shared)
        self._product = type(cast(Any, module).c_fc)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Compute what GPT2MLP computes."""
        mlp = cast(Any, self.module)
        if not self._is_plain() or self.stopped(hidden_states):
            return self.original(hidden_states)  # type: ignore[no-any-return]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        own = not x.is_cuda or (self.shared.fast_math and is_worth_it(x, self.shared))
        hidden = self._own(x) if own else self._library(x)
        y = torch.addmm(mlp.c_proj.bias, hidden, mlp.c_proj.weight)
        return y.view(*hidden_states.shape[:-1], y.shape[-1])

    def _is_plain(self) -> bool:
        """Whether the parts can be computed without calling them: since the patch, one may have been replaced by an
        adapter or have got a hook."""
        parts = self.module._modules
        if not all(type(parts[name]) is self._product for name in ("c_fc", "c_proj")):
            plain = False
        else:
            plain = not any(
                part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__
                for part in parts.values()
                if part is not None
            )
        if not plain and not torch.compiler.is_compiling():
            self.shared.tell("a part of an MLP has hooks or has been replaced, so the original code runs")
        return plain

    def _own(self, x: Tensor) -> Tensor:
        mlp = cast(Any, self.module)
        ops = torch.ops.warpline
        fused = ops.bias_gelu_fast if self.shared.fast_math else ops.bias_gelu
        return fused(torch.mm(x, mlp.c_fc.weight), mlp.c_fc.bias)  # type: ignore[no-any-return]

    def _library(self, x: Tensor) -> Tensor:
        """Use the library's product with bias and, in half precision, GELU (on CUDA its tanh form) in its epilogue."""
        fc = cast(Any, self.module).c_fc
        if x.dtype != torch.float32:
            return torch._addmm_activation(fc.bias, x, fc.weight, use_gelu=True)
        return F.gelu(torch.addmm(fc.bias, x, fc.weight), approximate="tanh")


class LayerNorm(Forward):
    """LayerNorm alone: the residual before it is added in the block, which is not replaced."""

    def __call__(self, input: Tensor) -> Tensor:  # torch passes the argument by this name
        """Compute what nn.LayerNorm computes."""
        norm = cast(Any, self.module)
        if not is_worth_it(input, self.shared) or self.stopped(input):
            return self.original(input)  # type: ignore[no-any-return]
        x = input.reshape(-1, input.shape[-1])
        return torch.ops.warpline.layernorm(x, norm.weight, norm.bias, norm.eps).view(input.shape)  # type: ignore[no-any-return]
