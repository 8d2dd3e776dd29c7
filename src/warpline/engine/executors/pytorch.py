"""The torch executor: the readable model, one step at a time. Slow, and runs on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from warpline.config import WEIGHT_BYTES
from warpline.engine.executors.base import Executor
from warpline.engine.executors.sampling import advance
from warpline.engine.request import Span
from warpline.engine.slots import Slots
from warpline.model.gpt2 import GPT2, Block
from warpline.model.quantise import dequantised
from warpline.model.weights import Weights


class TorchExecutor(Executor):
    """Runs `GPT2` unchanged; int8 weights are dequantised."""

    name = "torch"
    dtypes = tuple(WEIGHT_BYTES)
    can_quantise_kv = True

    def __init__(self, weights: Weights, device: torch.device, dtype: str):
        super().__init__(weights, device, dtype)
        if device.type == "cuda":  # so that it need not wait for the host after every token
            self.chunk, self.most_steps = 8, 64
        with torch.device("meta"):
            self.model = GPT2(weights.config)
        plain = dequantised(weights, weights.activations) if weights.is_quantised else weights
        self.model.load_state_dict(plain.tensors, assign=True)
        self.model.requires_grad_(False).eval()
        self.cached = weights.activations  # torch's attention takes no other dtype

    @torch.inference_mode()
    def _prefill(self, slots: Slots, spans: Sequence[Span]) -> None:
        """Run spans of equal positions as one rectangle: none is written beyond its end."""
        for start, end in sorted({(span.start, span.end) for span in spans}):
            self._rectangle(slots, start, end, [span for span in spans if (span.start, span.end) == (start, end)])

    def _rectangle(self, slots: Slots, start: int, end: int, spans: Sequence[Span]) -> None:
        named = [span.slot for span in spans]
        index = slots.crossing.select(named, len(named))
        last = torch.full((len(spans),), end - start - 1, device=slots.device)
        ids = slots.tokens[index, start:end]
        logits = self._run(slots, named, index, ids, start=torch.full_like(last, start), span=end, last=last)
        lanes = [lane for span in spans for lane in span.lanes]
        if lanes:
            row = [i for i, span in enumerate(spans) for _ in span.lanes]
            advance(slots, lanes, logits[torch.tensor(row, device=slots.device)])

    @torch.inference_mode()
    def _decode(self, slots: Slots, lanes: Sequence[int], n: int) -> None:
        """Run one forward pass per token."""
        index = slots.crossing.select(lanes, len(lanes))
        longest = int(slots.length[index].max())
        for step in range(n):
            self._reached("decode")
            position = slots.length[index] - 1
            ids, span = slots.tokens[index, position][:, None], min(longest + step, slots.capacity)
            advance(slots, lanes, self._run(slots, lanes, index, ids, start=position, span=span)[:, 0], index)

    def _run(self, slots: Slots, lanes: Sequence[int], index: Tensor, ids: Tensor, **told: Tensor | int) -> Tensor:
        """Run the model on `ids` and return its logits. The cache is read in place if the lanes are the first slots in
        order."""
        in_place = all(slot == lane for lane, slot in enumerate(lanes))
        with self._chosen_kernels():
            logits: Tensor = self.model(ids, cache=slots.cache, slots=None if in_place else index, **told)
        return logits

    def observe(self, slots: Slots, lanes: Sequence[int]) -> dict[str, Tensor]:
        """Decode a step with hooks on the modules."""
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
            self.decode(slots, lanes, 1)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    @contextmanager
    def _chosen_kernels(self) -> Iterator[None]:
        """Keep torch from using two of its kernels.

        For bf16 on a CPU oneDNN uses AMX instructions, which kill the process on virtual machines that announce but do
        not allow them; torch's own kernels decode as fast and are slower only in prefill. cuDNN's attention plans anew
        for every length of the cache, some 60 ms each time.
        """
        onednn = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(onednn and not (self.device.type == "cpu" and self.dtype == "bf16"))
        try:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                yield
        finally:
            torch._C._set_mkldnn_enabled(onednn)
