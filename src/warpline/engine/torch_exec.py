"""The torch executor: the readable model, one step at a time. Slow, right, and at home on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from warpline.engine.executor import Executor
from warpline.engine.sampling import advance
from warpline.engine.state import State
from warpline.model.gpt2 import GPT2, Block
from warpline.model.weights import Weights


class TorchExecutor(Executor):
    """Runs `GPT2` as it stands."""

    name = "torch"

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        super().__init__(weights, device, dtype)
        self.chunk = 8 if device.type == "cuda" else 1  # a GPU should not wait for the host after every token
        with torch.device("meta"):
            self.model = GPT2(weights.config)
        self.model.load_state_dict(weights.tensors, assign=True)
        self.model.requires_grad_(False).eval()

    @torch.inference_mode()
    def _prefill(self, state: State) -> None:
        """Prompts stand left-aligned in one rectangle; what a shorter one has behind its end is overwritten later."""
        state.restart()
        ids = state.tokens[: state.batch, : state.longest]
        last = state.length[: state.batch] - 1
        with self._chosen_kernels():
            logits = self.model(ids, cache=state.cache, span=state.longest, last=last)
        advance(state, logits)

    @torch.inference_mode()
    def _decode(self, state: State, n: int) -> None:
        """One forward pass per token."""
        for step in range(n):
            position = state.length[: state.batch] - 1
            ids = state.tokens[: state.batch].gather(1, position[:, None])
            span = min(state.longest + step, state.capacity)
            with self._chosen_kernels():
                logits = self.model(ids, cache=state.cache, start=position, span=span)
            advance(state, logits[:, 0])

    def observe(self, state: State) -> dict[str, Tensor]:
        """By hooks on the modules."""
        seen: dict[str, Tensor] = {}

        def keeps(name: str) -> Callable[..., None]:
            return lambda _module, _inputs, output: seen.update({name: output[:, 0].clone()})

        def keeps_input(name: str) -> Callable[..., None]:
            return lambda _module, inputs: seen.update({name: inputs[0][:, 0].clone()})

        hooks = [self.model.register_forward_hook(keeps("logits"))]
        for layer, module in enumerate(self.model.h):
            block, h = cast(Block, module), f"h.{layer}"
            hooks += [
                block.register_forward_pre_hook(keeps_input(f"{h}.in")),
                block.attn.c_attn.register_forward_hook(keeps(f"{h}.qkv")),
                block.attn.c_proj.register_forward_pre_hook(keeps_input(f"{h}.attention")),
                block.ln_2.register_forward_pre_hook(keeps_input(f"{h}.middle")),
                block.mlp.c_proj.register_forward_pre_hook(keeps_input(f"{h}.hidden")),
                block.register_forward_hook(keeps(f"h.{layer + 1}.in")),
            ]
        try:
            self.decode(state, 1)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    @contextmanager
    def _chosen_kernels(self) -> Iterator[None]:
        """Keep torch from two of its kernels.

        For bf16 on a CPU oneDNN takes AMX instructions, which kill the process on virtual machines that announce but
        do not grant them; torch's own kernels decode as fast and only prefill more slowly. cuDNN's attention plans
        anew for every length of the cache, some 60 ms each time.
        """
        onednn = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(onednn and not (self.device.type == "cpu" and self.dtype == "bf16"))
        try:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                yield
        finally:
            torch._C._set_mkldnn_enabled(onednn)
