"""Converts a request's settings into `SamplingParams`; the only module that knows both."""

from __future__ import annotations

import functools
from typing import Any

from warpline.config import SamplingParams
from warpline.errors import ConfigError
from warpline.serve.errors import bad
from warpline.serve.protocol import ChatRequest, CompletionRequest, Sampling, stops_of

#: OpenAI's defaults, where they differ from the library's.
DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
DEFAULT_MAX_TOKENS = 16
_SAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "ignore_eos",
)  # fmt: skip


def params_of(
    asked: Sampling, *, room: int, vocab: int, logprobs: int | None, stops: tuple[str, ...] = ()
) -> SamplingParams:
    """Return the engine's settings; `room` is the tokens left in the context, `stops` a template's stop texts."""
    most = _max_tokens(asked, room)
    named: dict[str, Any] = {**DEFAULTS, "max_tokens": max(1, min(most, room)), "logprobs": logprobs}
    for name in _SAME:
        value = getattr(asked, name)
        if value is not None:
            named[name] = value
    if asked.top_k is not None:
        named["top_k"] = max(0, asked.top_k)  # some clients send -1 for all
    if asked.seed is not None:
        named["seed"] = asked.seed % 2**64
    if asked.logit_bias:
        biases = {_token_id(key, vocab): value for key, value in asked.logit_bias.items()}
        named["logit_bias"] = tuple(biases.items())
    named["stop"] = stops_of(asked.stop) + stops
    if named.get("min_tokens", 0) > named["max_tokens"]:
        raise bad(
            f"min_tokens {named['min_tokens']} exceeds the {named['max_tokens']} tokens there can be", "min_tokens"
        )
    try:
        return _checked(tuple(named.items()))
    except ConfigError as error:
        word = str(error).split(" ", 1)[0]
        raise bad(str(error), word if word in asked.__struct_fields__ else None) from None


@functools.lru_cache(maxsize=1024)
def _checked(named: tuple[tuple[str, Any], ...]) -> SamplingParams:
    """Check settings; cached, because clients send the same ones again and again."""
    return SamplingParams(**dict(named))


def _max_tokens(asked: Sampling, room: int) -> int:
    if isinstance(asked, ChatRequest):
        found = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        return room if found is None else found
    return DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens


def wants_nothing(asked: Sampling) -> bool:
    """Whether no token is requested: the prompt is to be scored or echoed only."""
    return _max_tokens(asked, 1) == 0


def _token_id(key: str, vocab: int) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab):
        raise bad(f"logit_bias takes token ids below {vocab:,}, not {key[:40]!r}", "logit_bias")
    return int(key)


def refuse_unsupported(asked: Sampling) -> None:
    """Raise if the request needs what this server cannot do."""
    if asked.stream_options is not None and not asked.stream:
        raise bad("stream_options needs stream: true", "stream_options")
    if isinstance(asked, CompletionRequest):
        if asked.suffix:
            raise bad("suffix is not supported: the model writes forward only", "suffix", "unsupported")
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise bad("best_of is not supported: ask for n and choose", "best_of", "unsupported")
    if isinstance(asked, ChatRequest):
        _refuse_in_chat(asked)


def _refuse_in_chat(asked: ChatRequest) -> None:
    for name in ("tools", "functions", "audio", "reasoning_effort"):
        if getattr(asked, name):
            raise bad(f"{name} is not supported: this model writes text", name, "unsupported")
    for name in ("tool_choice", "function_call"):
        if getattr(asked, name) not in (None, "none", "auto"):
            raise bad(f"{name} is not supported: there are no tools", name, "unsupported")
    form = asked.response_format
    if form is not None and form.get("type") != "text":
        raise bad("response_format is not supported: leave it out", "response_format", "unsupported")
    if asked.modalities is not None and asked.modalities != ["text"]:
        raise bad("modalities other than text are not supported", "modalities", "unsupported")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise bad("top_logprobs needs logprobs: true", "top_logprobs")
