"""CTranslate2, a C++ engine for transformers, on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from warpline.bench.methods.base import Converted, Method
from warpline.bench.workloads import Case
from warpline.model.export import export
from warpline.model.weights import Weights

#: As transformers reads it; conversions lie beside it.
_exported = Converted(lambda weights, folder: export(weights, folder / "hf"))


class CTranslate2(Method):
    """In the precision of the case."""

    title = "CTranslate2"
    devices = ("cpu",)
    dtypes = ("fp32",)
    quantization = "float32"
    startup_seconds = 5.0

    @classmethod
    def missing(cls) -> str | None:
        """Both it and transformers, which reads the model for it."""
        for package in ("ctranslate2", "transformers"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: pip install 'warpline[peers]'"
        return None

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        import ctranslate2
        from transformers.utils import logging as chatter

        chatter.set_verbosity_error()
        chatter.disable_progress_bar()
        folder = _exported.folder(weights)
        target = folder / self.quantization
        if not target.exists():
            converter = ctranslate2.converters.TransformersConverter(str(folder / "hf"))
            converter.convert(str(target), quantization=self.quantization)
        threads = torch.get_num_threads()
        self._generator: Any = ctranslate2.Generator(
            str(target), device="cpu", intra_threads=threads, inter_threads=1, compute_type=self.quantization
        )
        self._tokenizer = weights.tokenizer()

    def _as_tokens(self, prompts: Tensor) -> list[list[str]]:
        return [[self._tokenizer.piece(i) for i in row] for row in prompts.tolist()]

    def generate(self, prompts: Tensor, new: int) -> Tensor:
        """Greedy, to the full length."""
        results = self._generator.generate_batch(
            self._as_tokens(prompts),
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return torch.tensor([result.sequences_ids[0] for result in results])

    def logits(self, prompts: Tensor) -> Tensor:
        """It returns those of every position."""
        import numpy as np

        everything = self._generator.forward_batch(self._as_tokens(prompts))
        return torch.from_numpy(np.array(everything))[:, -1].float()

    def close(self) -> None:
        """The generator holds the weights."""
        super().close()
        del self._generator


class CTranslate2Int8(CTranslate2):
    """Weights in int8. Not what the others compute, so its tokens may differ; the row says how many do."""

    title = "CTranslate2, int8 weights"
    quantization = "int8"
    exact = False
