"""The leaves: MLP and LayerNorm. Blocks and models are never touched: their signatures move between versions."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.hf.gate import Forward, is_few
from warpline.kernels import torch_ops

#: Importing it registers the operators.
OPERATORS = torch_ops.OPERATORS


class MLP(Forward):
    """First product, bias and GELU in one pass, second product: Conv1D's [in, out] matrices serve as they are."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """As GPT2MLP."""
        mlp = cast(Any, self.module)
        if self.stopped(hidden_states):
            return self.original(hidden_states)  # type: ignore[no-any-return]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        hidden = self._few(x) if is_few(x, len(x)) else self._many(x)
        y = torch.addmm(mlp.c_proj.bias, hidden, mlp.c_proj.weight)
        return y.view(*hidden_states.shape[:-1], y.shape[-1])

    def _many(self, x: Tensor) -> Tensor:
        mlp = cast(Any, self.module)
        ops = torch.ops.warpline
        fused = ops.bias_gelu_fast if self.shared.fast_math else ops.bias_gelu
        return fused(torch.mm(x, mlp.c_fc.weight), mlp.c_fc.bias)  # type: ignore[no-any-return]

    def _few(self, x: Tensor) -> Tensor:
        """The library's product with bias and, in half precision, GELU in its epilogue; on CUDA it is the tanh form."""
        fc = cast(Any, self.module).c_fc
        if x.dtype != torch.float32:
            return torch._addmm_activation(fc.bias, x, fc.weight, use_gelu=True)
        return F.gelu(torch.addmm(fc.bias, x, fc.weight), approximate="tanh")


class LayerNorm(Forward):
    """LayerNorm alone: the residual before it is added in the block, which is not ours to change."""

    def __call__(self, input: Tensor) -> Tensor:  # torch calls it so
        """As nn.LayerNorm."""
        norm = cast(Any, self.module)
        rows = input.numel() // input.shape[-1]
        if is_few(input, rows) or self.stopped(input):
            return self.original(input)  # type: ignore[no-any-return]
        x = input.reshape(rows, input.shape[-1])
        return torch.ops.warpline.layernorm(x, norm.weight, norm.bias, norm.eps).view(input.shape)  # type: ignore[no-any-return]
