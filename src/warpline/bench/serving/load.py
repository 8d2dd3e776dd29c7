"""What is sent to a server, and when: prompts of seeded lengths, arrivals at a rate. Needs no torch."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from warpline.bench.lengths import drawn
from warpline.errors import ConfigError
from warpline.model.tokenizer import Tokenizer

#: The path of each API.
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
#: Prompts are drawn from these words: tokens of GPT-2 that stay one token wherever they stand.
WORD = re.compile(r" [a-z]{2,12}")


class Prompt(NamedTuple):
    """A prompt as ids and as text, and how many tokens are wanted after it."""

    ids: list[int]
    text: str
    new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of one run: how many requests, how long they are, at which rate they arrive."""

    requests: int = 64
    prompt: int = 128
    new: int = 128
    #: Spread of the lengths' logarithms, with means `prompt` and `new`; 0 gives all the same length.
    spread: float = 0.0
    #: Prompt and output together have at most this many tokens.
    context: int = 1024
    #: Requests per second; None sends each as soon as `concurrency` allows.
    rate: float | None = None
    #: 1 is a Poisson process; larger values are more even, smaller ones come in bursts.
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0
    api: str = "completions"
    #: Whether prompts are token ids instead of text, which needs a server with GPT-2's vocabulary.
    ids: bool = False
    #: Fields removed from every request, and fields added to it.
    omit: tuple[str, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt + self.new > self.context:
            together = f"{self.prompt} + {self.new} tokens"
            raise ConfigError(f"{together} are more than the context of {self.context}: see --context")
        if self.ids and self.api == "chat":
            raise ConfigError("a chat's messages are text: leave --ids out")

    def described(self) -> dict[str, Any]:
        """Return the fields of a row."""
        return {
            "api": self.api, "ids": self.ids, "input_len": self.prompt, "output_len": self.new, "spread": self.spread,
            "seed": self.seed, "request_rate": self.rate, "burstiness": self.burstiness,
            "max_concurrency": self.concurrency, "body": dict(self.body),
        }  # fmt: skip

    def lengths(self) -> list[tuple[int, int]]:
        """Return the tokens of each prompt and of each output."""
        if not self.spread:
            return [(self.prompt, self.new)] * self.requests
        draw = random.Random(f"lengths {self.seed}")
        return list(drawn(draw, self.requests, self.prompt, self.new, self.context, self.spread))

    def arrivals(self) -> list[float]:
        """Return the seconds after the start at which each request is sent."""
        if self.rate is None:
            return [0.0] * self.requests
        draw = random.Random(f"arrivals {self.seed}")
        scale = 1 / (self.rate * self.burstiness)
        gaps = (draw.gammavariate(self.burstiness, scale) for _ in range(self.requests - 1))
        return list(itertools.accumulate(gaps, initial=0.0))

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts in order; the same every time."""
        draw = random.Random(f"prompts {self.seed}")
        for length, new in self.lengths():
            chosen = draw.choices(_words(), k=length)
            yield Prompt([token for token, _ in chosen], "".join(word for _, word in chosen), new)

    def bodies(self, model: str) -> Iterator[bytes]:
        """Yield the requests as JSON."""
        for i, prompt in enumerate(self.prompts()):
            asked: dict[str, Any] = {"model": model, "max_tokens": prompt.new, "temperature": 0, "seed": i}
            asked |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
            if self.api == "chat":
                asked["messages"] = [{"role": "user", "content": prompt.text}]
            else:
                asked["prompt"] = prompt.ids if self.ids else prompt.text
            asked = {name: value for name, value in asked.items() if name not in self.omit} | dict(self.body)
            yield json.dumps(asked, separators=(",", ":")).encode()


@functools.cache
def _words() -> list[tuple[int, str]]:
    tokenizer = Tokenizer.gpt2()
    decoded = ((i, tokenizer.decode([i])) for i in range(len(tokenizer)))
    return [(i, text) for i, text in decoded if WORD.fullmatch(text)]
