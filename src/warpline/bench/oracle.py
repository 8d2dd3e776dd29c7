"""Judge whether a method's tokens are right: by the readable model in float32, given the method's own text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from warpline.config import KV_DTYPES, ROUNDING
from warpline.model.gpt2 import GPT2
from warpline.model.quantise import dequantised
from warpline.model.weights import Weights

#: At most so many rows and tokens are judged; all rows of a batch run through the same kernels.
ROWS, TOKENS = 4, 2048


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a method's tokens compare with the likeliest ones."""

    agreeing: float  # share of tokens that are the oracle's likeliest, each given the method's own text before it
    worst: float  # largest deficit of a chosen token's logit, in standard deviations of the logits
    allowed: float

    @property
    def right(self) -> bool:
        """Whether every token is the likeliest, within the rounding of the dtype."""
        return self.worst <= self.allowed


class Oracle:
    """The readable model with the weights in float32, or with the dequantised int8 codes."""

    def __init__(self, weights: Weights):
        with torch.device("meta"):
            self.model = GPT2(weights.config)
        self.model.load_state_dict(dequantised(weights, torch.float32).tensors, assign=True)
        self.model.requires_grad_(False).eval()
        self.layers = weights.config.n_layer
        self._verdicts: dict[bytes, Verdict] = {}

    def judge(self, prompts: Tensor, tokens: Tensor, dtype: str) -> Verdict:
        """Return the verdict on `tokens` [B, new] after `prompts` [B, P]; equal arguments are judged once."""
        rows = max(1, min(ROWS, TOKENS // (prompts.shape[1] + tokens.shape[1])))
        prompts, tokens = prompts[:rows], tokens[:rows]
        key = dtype.encode() + prompts.cpu().numpy().tobytes() + tokens.cpu().numpy().tobytes()
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(prompts, tokens.to(prompts.device), dtype)
        return self._verdicts[key]

    @torch.inference_mode()
    def _judge(self, prompts: Tensor, tokens: Tensor, dtype: str) -> Verdict:
        """A token is right if no other is likelier by more than rounding explains: about four roundings a layer, adding
        up like a random walk, relative to the spread of the logits; eight times that is allowed."""
        text = torch.cat((prompts, tokens[:, :-1]), dim=1)
        if tokens.shape[1] == 1:
            logits = self.model(text, last=text.new_full((len(text),), text.shape[1] - 1))[:, None]
        else:
            logits = self.model(text)[:, prompts.shape[1] - 1 :]  # [B, new, V]
        best = logits.max(dim=-1)
        taken = logits.gather(-1, tokens[..., None])[..., 0]
        deficit = (best.values - taken) / logits.std(dim=-1)
        allowed = 8 * ROUNDING[KV_DTYPES[dtype]] * (4 * self.layers) ** 0.5 * 2  # two logits are compared
        same = (best.indices == tokens).float().mean()
        return Verdict(float(same), float(deficit.max()), allowed)
