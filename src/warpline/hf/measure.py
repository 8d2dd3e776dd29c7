"""Measures the gain of the patch in one run: the same weights in several models, timed in turn (`warpline hf`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpline.bench.protocol import Sample, collect, interleave
from warpline.config import SamplingParams
from warpline.engine.request import Request
from warpline.errors import ConfigError
from warpline.hf.patching import patch
from warpline.hf.report import Report
from warpline.model.weights import Weights

#: Calls before the timing: kernels are compiled, and the engine captures a prompt when it comes again.
WARM_UP = 3
WAYS = ("unpatched", "kernels only", "patched", "our engine alone")


@dataclass(frozen=True, slots=True)
class Row:
    """The times of one way to do one task."""

    what: str
    way: str
    tokens: int  # generated or read in each repetition
    sample: Sample
    speed_up: float  # over unpatched

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median repetition."""
        return self.tokens / self.sample.median


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was patched, and what that gained."""

    report: Report
    rows: list[Row]
    same_tokens: float  # share of generated tokens that equal the unpatched model's


class Measure:
    """Three transformers models over the same weights: unpatched, with our kernels, and with our `generate` too."""

    def __init__(self, weights: Weights, device: torch.device, *, fast_math: bool = False):
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError("transformers is not installed: pip install 'warpline[hf]'")
        from warpline.bench.methods.hf import as_transformers

        self.config, self.device = weights.config, device
        self.plain, self.kernels, self.whole = as_transformers(weights, device, copies=3)
        patch(self.kernels, generate=False, fast_math=fast_math)
        self.report = patch(self.whole, fast_math=fast_math)

    def run(
        self, *, batch: int = 1, prompt: int = 16, new: int = 100, repetitions: int = 7, budget_seconds: float = 20
    ) -> Measurement:
        """Generate greedily, and run forward passes over prompts; the ways are timed in turn."""
        if min(batch, prompt, new) < 1 or prompt + new > self.config.n_positions:
            raise ConfigError(
                f"{batch} × ({prompt} + {new}) tokens do not fit into the context of {self.config.n_positions:,}"
            )
        ids = self._ids(batch, prompt)
        models = {"unpatched": self.plain, "kernels only": self.kernels, "patched": self.whole}
        ways: dict[str, Callable[[], Any]] = {way: _generation(model, ids, new) for way, model in models.items()}
        if "generate" in self.report.replaced:
            ways["our engine alone"] = self._engine(ids, new)
        results = {way: self._warm(call) for way, call in ways.items()}
        same = (results["patched"] == results["unpatched"])[:, prompt:].float().mean()
        limits = {"repetitions": repetitions, "budget_seconds": budget_seconds}
        rows = self._timed(f"generate {batch} × ({prompt} + {new})", batch * new, ways, limits)
        for rows_, length in self._passes():
            ids = self._ids(rows_, length)
            passes = {way: _forward(models[way], ids) for way in ("unpatched", "kernels only")}
            for call in passes.values():
                self._warm(call)
            rows += self._timed(f"forward {rows_} × {length}", rows_ * length, passes, limits)
        return Measurement(self.report, rows, float(same))

    def _passes(self) -> list[tuple[int, int]]:
        context = self.config.n_positions
        return [(1, context), (16, context)] if self.device.type == "cuda" else [(1, min(context, 128))]

    def _ids(self, rows: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.config.vocab_size, (rows, length), generator=generator).to(self.device)

    def _engine(self, ids: Tensor, new: int) -> Callable[[], Any]:
        runner = self.whole.generate.runner or self.whole.generate.renew(None)
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        length = ids.shape[1]
        requests = [Request(row, params, 0, i, length + new) for i, row in enumerate(ids.tolist())]
        return lambda: runner.run(requests)

    def _warm(self, call: Callable[[], Any]) -> Any:
        for _ in range(WARM_UP if self.device.type == "cuda" else 1):
            result = call()
        return result

    def _timed(self, what: str, tokens: int, ways: dict[str, Callable[[], Any]], limits: dict[str, Any]) -> list[Row]:
        samples = collect(interleave(ways, self.device, **limits))
        usual = samples["unpatched"].median
        return [Row(what, way, tokens, samples[way], usual / samples[way].median) for way in WAYS if way in samples]


def _generation(model: Any, ids: Tensor, new: int) -> Callable[[], Any]:
    mask = torch.ones_like(ids)
    return lambda: model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)


def _forward(model: Any, ids: Tensor) -> Callable[[], Any]:
    @torch.no_grad()
    def run() -> Any:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1)

    return run
