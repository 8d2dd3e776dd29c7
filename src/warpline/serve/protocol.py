"""Requests as they arrive; one rule for fields: whatever could change the answer is honoured or refused.

Fields that the structs do not have are refused. Fields of OpenAI's API that change nothing in an answer are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from warpline.errors import nearest
from warpline.serve.errors import ApiError, bad

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Texts = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=32)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)] | Texts
TokenIds = list[int]
#: msgspec allows one kind of list in a union, so `prompts_of` checks what is in it.
Prompt = Annotated[
    str | Annotated[list[str | int | TokenIds], Meta(min_length=1)],
    Meta(description="A text, token ids, a list of texts, or a list of lists of token ids."),
]


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object with these fields only."""


class StreamOptions(Struct, kw_only=True):
    """What a stream contains besides text."""

    include_usage: bool = False


class Sampling(Struct, kw_only=True):
    """The fields that completions and chats have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    # extensions to OpenAI's fields
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stream_interval: (
        Annotated[int, Meta(ge=1, le=2**31 - 1, description="Tokens in an event; else by time.")] | None
    ) = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    # accepted, because they change nothing
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    best_of: Positive | None = None
    suffix: str | None = None


class Part(msgspec.Struct, kw_only=True):
    """A part of a message; only text parts are accepted."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    # refused unless they ask for nothing
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    reasoning_effort: str | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {}


def decode(body: bytes, kind: type[Any]) -> Any:
    """Parse the request in `body`; an error names the field."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise bad("the body is nested too deeply") from None


def _explained(message: str, kind: type[Any]) -> ApiError:
    what, _, where = message.partition(" - at `$")
    if what.startswith("Object contains unknown field `") and not where:
        name = what.split("`")[1]
        return bad(f"unknown field '{name}'{nearest(name, kind.__struct_fields__)}: see /docs", name, "unknown_field")
    if what.startswith("Object missing required field `") and not where:
        return bad(f"'{what.split('`')[1]}' is missing", what.split("`")[1])
    path = where.rstrip("`").lstrip(".")
    param = path.split("[")[0].split(".")[0] or None
    return bad(f"{path}: {what}" if path else f"the body: {what}", param)


def prompts_of(prompt: str | list[Any], most: int) -> list[str] | list[list[int]]:
    """Return a list of texts, or a list of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise bad("prompt mixes texts, token ids and lists: give one kind", "prompt")
    if kinds == {int}:
        return [prompt]
    if len(prompt) > most:
        raise bad(f"prompt has {len(prompt):,} entries, and at most {most:,} fit in a request", "prompt")
    return prompt


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
