"""Parses a line of a batch and formats the line that answers it. A line is a prompt with settings and other fields, or
a request of OpenAI's batch format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from warpline.config import SamplingParams
from warpline.errors import ConfigError

#: Settings of the whole job that a line may override.
SETTINGS = tuple(
    name
    for name in SamplingParams.__dataclass_fields__
    if name not in ("n", "logprobs", "max_new_tokens")  # one line, one text
)
#: Fields that an answer adds to those of its line.
ADDED = ("line", "completion", "finish_reason", "prompt_tokens", "completion_tokens", "seed")
#: The paths that OpenAI's requests may have.
URLS = ("/v1/completions", "/v1/chat/completions")
#: Most characters of a bad line that is not JSON in its error.
SHOWN = 2000


@dataclass(slots=True)
class Plain:
    """A line with a prompt."""

    number: int  # of its line, from 1
    fields: dict[str, Any]
    prompt: str | list[int]
    params: SamplingParams

    def answer(self, completion: str, reason: str, prompt_tokens: int, tokens: int) -> bytes:
        """Return the line with its completion."""
        added = (self.number, completion, reason, prompt_tokens, tokens, self.params.seed)
        return dumped({**self.fields, **dict(zip(ADDED, added, strict=True))})


@dataclass(slots=True)
class OpenAI:
    """A line with a request of OpenAI's batch format."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]

    def answer(self, status: int, body: Any) -> bytes:
        """Return the line in the form of OpenAI's output files."""
        digest = hashlib.blake2b(f"{self.number} {self.custom_id}".encode("utf-8", "replace"), digest_size=12)
        response = {"status_code": status, "request_id": f"req_{digest.hexdigest()}", "body": body}
        answer = {"id": f"batch_req_{digest.hexdigest()}", "custom_id": self.custom_id}
        return dumped({**answer, "response": response, "error": None})


class BadLine(Exception):
    """A line that cannot be answered; `line` is what the file of errors gets."""

    def __init__(self, number: int, why: str, given: Any):
        super().__init__(why)
        found = given if isinstance(given, dict | list | str | int | float | None) else str(given)
        found = found[:SHOWN] if isinstance(found, str) else found
        custom = {"custom_id": given["custom_id"]} if isinstance(given, dict) and "custom_id" in given else {}
        self.line = dumped({"line": number, **custom, "error": " ".join(why.split()), "input": found})


def dumped(found: Any) -> bytes:
    """Return a line of JSON. Half of a surrogate pair, which UTF-8 cannot encode, stays escaped."""
    try:
        return json.dumps(found, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(found).encode() + b"\n"


def read(number: int, raw: bytes | Mapping[str, Any], defaults: SamplingParams, column: str) -> Plain | OpenAI:
    """Parse a line. Without a seed of its own it gets the job's plus its number: repeated prompts get different texts,
    and every run of the job gives the same ones."""
    given: Any
    if isinstance(raw, bytes):
        try:
            given = json.loads(raw)
        except (ValueError, RecursionError) as error:
            why = f"not JSON: {error}" if isinstance(error, ValueError) else "nested too deeply"
            raise BadLine(number, why, raw.decode(errors="replace").rstrip("\n")) from None
    else:
        given = dict(raw)
    if isinstance(given, str):
        given = {column: given}
    if not isinstance(given, dict):
        raise BadLine(number, f"a line is an object with '{column}', or a text", given)
    seed = ((defaults.seed or 0) + number - 1) % 2**63
    if "body" in given and ("custom_id" in given or "url" in given):
        return _openai(number, given, seed)
    return _plain(number, given, defaults, column, seed)


def _plain(number: int, given: dict[str, Any], defaults: SamplingParams, column: str, seed: int) -> Plain:
    prompt = given.get(column)
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or is_ids):
        missing = f"'{column}' is missing" if prompt is None else f"'{column}' is neither a text nor token ids"
        raise BadLine(number, missing, given)
    if not prompt:
        raise BadLine(number, f"'{column}' is empty: <|endoftext|> starts from nothing", given)
    taken = [name for name in ADDED if name in given and name != "seed"]
    if taken:
        raise BadLine(number, f"'{taken[0]}' is the name of a result: rename the field", given)
    changes = {name: given[name] for name in SETTINGS if name != column and given.get(name) is not None}
    if isinstance(biases := changes.get("logit_bias"), dict):  # keys in JSON are strings
        changes["logit_bias"] = {int(key) if key.isdecimal() else key: bias for key, bias in biases.items()}
    try:
        return Plain(number, given, prompt, replace(defaults, **({"seed": seed} | changes)))
    except (ConfigError, TypeError) as error:
        raise BadLine(number, str(error), given) from None


def _openai(number: int, given: dict[str, Any], seed: int) -> OpenAI:
    custom, url, body = given.get("custom_id"), given.get("url"), given["body"]
    if not isinstance(custom, str):
        raise BadLine(number, "custom_id must be a text", given)
    if given.get("method", "POST") != "POST" or url not in URLS:
        raise BadLine(number, f"method must be POST and url one of {', '.join(URLS)}", given)
    if not isinstance(body, dict):
        raise BadLine(number, "body must be an object", given)
    if body.get("stream"):
        raise BadLine(number, "a batch has no streams: leave 'stream' out", given)
    return OpenAI(
        number, custom, url, {"seed": seed} | {name: value for name, value in body.items() if value is not None}
    )
