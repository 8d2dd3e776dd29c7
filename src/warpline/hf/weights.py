"""The weights of a Hugging Face model for the engine: shared where the layout allows, copied where not.

Our kernels read matrices as [out, in] rows; Conv1D stores [in, out]. So on a GPU the four matrices of each layer are
copied once, transposed; everything else is the model's own memory. The torch executor uses the transposed views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from warpline.config import ModelConfig
from warpline.errors import ModelError
from warpline.model import parameters
from warpline.model.quantise import quantised
from warpline.model.weights import Weights

#: Elements of each parameter that are compared, to notice changes through `.data`, which torch does not count.
SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Taken:
    """Weights for the engine, with the bytes that were copied and those that are shared."""

    weights: Weights
    copied_bytes: int
    shared_bytes: int


def take(model: Any, *, copy: bool, eos: int | None) -> Taken:
    """Return the weights of a GPT2LMHeadModel; `copy` for contiguous rows. `eos` is the token that ends a text."""
    raw = {**model.config.to_dict(), "model_type": model.config.model_type, "eos_token_id": eos}
    tied = model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    config = ModelConfig.from_hf({**raw, "tie_word_embeddings": tied}, "this model")
    here = {name.removeprefix("transformer."): tensor.detach() for name, tensor in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    sizes = {True: 0, False: 0}
    for name, shape in parameters.shapes(config).items():
        if name not in here:
            raise ModelError(f"this model has no parameter {name}")
        transposed = name.endswith(parameters.CONV1D)
        value = here[name].t() if transposed else here[name]
        if tuple(value.shape) != shape:
            raise ModelError(f"this model's {name} is {tuple(value.shape)}, its config says {shape}")
        copied = copy and not value.is_contiguous()
        tensors[name] = value.contiguous() if copied else value
        sizes[copied] += value.nbytes
    return Taken(Weights("this model", config, tensors), sizes[True], sizes[False])


def in_codes(taken: Taken) -> Taken:
    """Return the same weights with int8 matrices, all of them copied."""
    weights = quantised(taken.weights)
    return Taken(weights, sum(tensor.nbytes for tensor in weights.tensors.values()), 0)


class Watch:
    """Notices that a model's parameters have changed: moved, converted, trained or loaded anew.

    torch counts changes in place, but not those through `.data`; for these a few elements of each parameter are
    compared, which costs one small kernel.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        found = held(modules)
        self._marks = _marks(found)
        with torch.inference_mode(False), torch.no_grad():
            self._views = [_sample(p.detach()) for p in found]
            self._seen = torch.cat(self._views).clone()

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        """Whether everything is unchanged."""
        if _marks(held(modules)) != self._marks:
            return False
        with torch.no_grad():
            return bool(torch.equal(torch.cat(self._views), self._seen))


def walk(model: nn.Module) -> list[nn.Module]:
    """Return the model and everything in it, like `model.modules()` but without removing duplicates: every call of
    generate pays for this, and it takes a third of the time."""
    found = [model]
    for module in found:
        found += [part for part in module._modules.values() if part is not None]
    return found


def held(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the parameters of these modules; tied ones appear twice."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def _marks(found: list[Tensor]) -> list[tuple[int, int, torch.dtype]]:
    return [
        (p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype)  # inference tensors have no version
        for p in found
    ]


def _sample(parameter: Tensor) -> Tensor:
    """Return a view, which shows later changes."""
    flat = parameter.view(-1) if parameter.is_contiguous() else parameter.diagonal()
    return flat[:: max(1, len(flat) // SAMPLES)]
