"""Prompts and settings as a caller may give them to `LLM`: one or many, texts or token ids."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from warpline.config import SamplingParams
from warpline.errors import ConfigError

#: A text, or token ids: a list, an array or a tensor of the host.
Prompt = str | Sequence[int] | np.ndarray | torch.Tensor


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, or many, as a list of prompts."""
    if isinstance(prompts, np.ndarray | torch.Tensor):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"a prompt is a text or a list of token ids, not {prompts!r:.40}")
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def joined(prompts: list[Sequence[int] | np.ndarray | torch.Tensor]) -> np.ndarray:
    """Concatenate prompts of token ids. For lists of integers `array` takes half of numpy's time."""
    if all(type(prompt) is list for prompt in prompts):
        return np.frombuffer(array("q", itertools.chain.from_iterable(cast(list[list[int]], prompts))), np.int64)
    arrays = [prompt.numpy() if isinstance(prompt, torch.Tensor) else np.asarray(prompt) for prompt in prompts]
    return np.concatenate(arrays)


def spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return settings for `count` prompts, from one for all of them or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(its, SamplingParams) for its in params):
        raise ConfigError(f"params must be SamplingParams, or a list of them, not {params!r:.60}")
    if len(params) != count:
        raise ConfigError(f"{count} prompts came with {len(params)} SamplingParams: give one, or one for each")
    return list(params)
