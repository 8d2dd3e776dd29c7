"""The API's description: OpenAPI 3.1, made from the structs that parse requests, and as a page."""

from __future__ import annotations

import functools
import html
from typing import Any

import msgspec

from warpline import __version__
from warpline.serve import page
from warpline.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_ERRORS = {
    400: "The request cannot be honoured; the message says why.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "The server is full: come again after Retry-After seconds.",
    500: "The model computed no numbers, or the server made a mistake.",
    503: "The model is being loaded, the server is ending, or the engine has failed.",
}
_NUMBER, _TEXT, _WHOLE = {"type": "number"}, {"type": "string"}, {"type": "integer"}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _list(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _answer(choice: dict[str, Any], whole: str) -> dict[str, Any]:
    usage = _object({"prompt_tokens": _WHOLE, "completion_tokens": _WHOLE, "total_tokens": _WHOLE})
    shared = {"index": _WHOLE, "finish_reason": {"enum": ["stop", "length"]}, "logprobs": {"type": ["object", "null"]}}
    choices = _list(_object({**shared, **choice}))
    head = {"id": _TEXT, "object": {"const": whole}, "created": _WHOLE, "model": _TEXT}
    return _object({**head, "choices": choices, "usage": usage}, timings={"type": "object"})


_MODEL = _object(
    {"id": _TEXT, "object": {"const": "model"}, "created": _WHOLE, "owned_by": _TEXT},
    max_model_len=_WHOLE, dtype=_TEXT, kv_dtype={"type": ["string", "null"]}, device=_TEXT, chat_template=_TEXT,
)  # fmt: skip
_MESSAGE = _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
_STREAMED = "With stream: true, events of text/event-stream instead, the last of them [DONE]."

#: Path, method, summary, the struct of its body, and the schema or content type of the answer.
_PATHS: tuple[tuple[str, str, str, type | None, dict[str, Any] | str], ...] = (
    ("/v1/completions", "post", f"Continue prompts. {_STREAMED}", CompletionRequest,
     _answer({"text": _TEXT}, "text_completion")),
    ("/v1/chat/completions", "post", f"Answer messages. {_STREAMED}", ChatRequest,
     _answer({"message": _MESSAGE}, "chat.completion")),
    ("/v1/models", "get", "The one model that is served.", None,
     _object({"object": {"const": "list"}, "data": _list(_MODEL)})),
    ("/v1/models/{model}", "get", "The same by its name.", None, _MODEL),
    ("/tokenize", "post", "The token ids of a text.", TokenizeRequest,
     _object({"count": _WHOLE, "max_model_len": _WHOLE, "tokens": _list(_WHOLE)},
             token_strs={"type": ["array", "null"], "items": _TEXT})),
    ("/detokenize", "post", "The text of token ids.", DetokenizeRequest, _object({"prompt": _TEXT})),
    ("/health", "get", "Whether requests are taken. Needs no key.", None, _object({"status": _TEXT}, reason=_TEXT)),
    ("/metrics", "get", "Counters and histograms for Prometheus.", None, "text/plain"),
    ("/version", "get", "The version of Warpline.", None, _object({"version": _TEXT})),
    ("/openapi.json", "get", "This description.", None, _object({"openapi": _TEXT})),
    ("/docs", "get", "This description as a page.", None, "text/html"),
    ("/", "get", "A page to write with the model.", None, "text/html"),
)  # fmt: skip


@functools.cache
def document() -> bytes:
    """Return the description as JSON."""
    kinds = [body for *_, body, _ in _PATHS if body is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    error = _object(
        {"message": _TEXT, "type": _TEXT}, param={"type": ["string", "null"]}, code={"type": ["string", "null"]}
    )
    schemas = {name: _tidied(schema) for name, schema in components.items()} | {"Error": _object({"error": error})}
    paths: dict[str, Any] = {}
    for path, method, summary, body, answer in _PATHS:
        paths.setdefault(path, {})[method] = _operation(path, summary, body, answer)
    found = {
        "openapi": "3.1.0",
        "info": {"title": "Warpline", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(found)


_DESCRIPTION = (
    "OpenAI's API for one model. A field that could change the answer is honoured or refused with 400, never ignored; "
    "fields that are not listed are refused. Errors have OpenAI's shape."
)


def _operation(path: str, summary: str, body: type | None, answer: dict[str, Any] | str) -> dict[str, Any]:
    content = {answer: {"schema": _TEXT}} if isinstance(answer, str) else {"application/json": {"schema": answer}}
    if body in (CompletionRequest, ChatRequest):
        content["text/event-stream"] = {}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{model}" in path:
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
    statuses = _ERRORS if body is not None else {code: _ERRORS[code] for code in (401, 404, 503)}
    if path == "/health":
        found["responses"]["503"] = {"description": _ERRORS[503], "content": content}
        return found
    for status, meaning in statuses.items():
        schema = {"$ref": "#/components/schemas/Error"}
        found["responses"][str(status)] = {
            "description": meaning,
            "content": {"application/json": {"schema": schema}},
        }
    return found


def _tidied(schema: dict[str, Any]) -> dict[str, Any]:
    """Distinguish the kinds of prompts, which one struct field cannot do."""
    properties = schema.get("properties", {})
    if "prompt" in properties and "anyOf" in properties["prompt"]:
        ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        texts = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
        many = {"type": "array", "items": ids, "minItems": 1}
        kinds = [{"type": "string", "minLength": 1}, texts, ids, many]
        schema = {**schema, "properties": {**properties, "prompt": {**properties["prompt"], "anyOf": kinds}}}
    return schema


# --- as a page --------------------------------------------------------------------------------------------------------

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;width:100%}td{vertical-align:top;padding:.1rem .8rem .1rem 0;"
    "border-top:1px solid #8884}code{font-size:.9em;overflow-wrap:anywhere}h2{margin-top:2rem;font-size:1.1rem}"
)


@functools.cache
def readable() -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the description as a page, and the page's headers."""
    found = msgspec.json.decode(document())
    schemas, parts = found["components"]["schemas"], []
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation['summary'])}</p>"
            )
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_fields(schemas[name]))
    title = f"Warpline {__version__}"
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{html.escape(_DESCRIPTION)} "
        f'The same <a href="openapi.json">for programs</a>.</p>{"".join(parts)}</body></html>'
    ).encode()
    return text, page.headers(text)


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{html.escape(name)}</code>{' (required)' if name in required else ''}</td>"
        f"<td>{html.escape(_kind(said))}</td></tr>"
        for name, said in schema["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _kind(said: dict[str, Any]) -> str:
    """Return a field's type in a few words."""
    if "anyOf" in said:
        kinds = [_kind(one) for one in said["anyOf"] if one.get("type") != "null"]
        words = ", or ".join(dict.fromkeys(kinds))
    elif "$ref" in said:
        words = said["$ref"].rpartition("/")[2]
    elif said.get("type") == "array":
        words = f"list of {_kind(said.get('items', {}))}"
    else:
        bounds = [f"{sign} {said[key]:,}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in said]
        words = " ".join([said.get("type", "anything"), *bounds])
    return f"{words}. {said['description']}" if "description" in said and "anyOf" in said else words
