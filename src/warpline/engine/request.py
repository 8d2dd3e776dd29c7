"""What the engine is asked for: a sequence, the parts of its prompt, and what its sampling needs. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from warpline.config import SamplingParams


class Request(NamedTuple):
    """One sequence to generate."""

    prompt: Sequence[int] | np.ndarray
    params: SamplingParams
    seed: int
    sample: int  # which of the n completions of the prompt
    limit: int  # length at which it ends, prompt included
    forced: Sequence[int] = ()  # tokens to take instead of drawing, for scoring a given text

    @property
    def stream(self) -> int:
        """Key of its random numbers: different seeds, prompts or samples draw independently."""
        content = np.array([self.seed, self.sample], np.uint64).tobytes() + np.asarray(self.prompt, np.int64).tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class Span(NamedTuple):
    """A part of a prompt to run: positions start … end - 1 of a slot. Requires: earlier positions are in the cache."""

    slot: int
    start: int
    end: int
    #: Slots whose first token follows from the last position: the slot itself and further completions of the same
    #: prompt, or none if more of the prompt follows.
    lanes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Needs:
    """The sampling stages that some sequences use. The host knows them, so that unused stages cost nothing."""

    penalty: bool = False
    biased: bool = False  # logits of single tokens are changed, by penalties or by the request's biases
    min_length: bool = False
    random: bool = False
    top_k: bool = False
    candidates: int = 0  # most tokens that top-k and top-p may have to rank; 0 if neither is used
    min_p: bool = False
    logprobs: int | None = None

    @property
    def likeliest(self) -> bool:
        """Whether every sequence takes its likeliest token, whatever came before."""
        return not (self.filters or self.random or self.min_length or self.logprobs is not None)

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded or penalised before the draw."""
        return self.filters_beside_top_p or self.candidates > 0

    @property
    def filters_beside_top_p(self) -> bool:
        """Whether there are other filters than top-p."""
        return self.penalty or self.biased or self.top_k or self.min_p

    def __or__(self, other: Needs) -> Needs:
        tops = [n.logprobs for n in (self, other) if n.logprobs is not None]
        return Needs(
            self.penalty or other.penalty,
            self.biased or other.biased,
            self.min_length or other.min_length,
            self.random or other.random,
            self.top_k or other.top_k,
            max(self.candidates, other.candidates),
            self.min_p or other.min_p,
            max(tops) if tops else None,
        )


def joined(needs: Iterable[Needs]) -> Needs:
    """Return what these sequences need together. Often all share one object."""
    different = list({id(one): one for one in needs}.values())
    return functools.reduce(Needs.__or__, different) if different else Needs()


@functools.lru_cache(maxsize=1024)
def needs_of(params: SamplingParams, vocab: int) -> Needs:
    """Return what a sequence with these parameters needs."""
    drawn = params.temperature > 0
    cut = drawn and (params.top_k or params.top_p < 1)
    return Needs(
        penalty=params.repetition_penalty != 1,
        biased=params.adjusts_tokens,
        min_length=params.min_tokens > 0,
        random=drawn,
        top_k=drawn and params.top_k > 0,
        candidates=min(params.top_k or vocab, vocab) if cut else 0,
        min_p=drawn and params.min_p > 0,
        logprobs=params.logprobs,
    )
