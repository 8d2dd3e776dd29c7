"""The routes, and the handlers behind them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.routing import Route

from warpline import __version__
from warpline.errors import ConfigError
from warpline.serve import chat, openapi
from warpline.serve.asked import Asked
from warpline.serve.errors import ApiError, bad
from warpline.serve.events import Chat, Completions, Style
from warpline.serve.generation import Generation, Message, Receive, Send
from warpline.serve.page import page
from warpline.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
    decode,
    prompts_of,
)
from warpline.serve.sampling import params_of, refuse_unsupported, wants_nothing
from warpline.serve.state import State

logger = logging.getLogger(__name__)

Scope = Message
Handler = Callable[[State, Scope, Receive, Send], Awaitable[None]]

#: Seconds within which a body must arrive.
BODY_SECONDS = 30.0
#: A prompt of this many characters is encoded in another thread, so that the event loop goes on.
LONG = 8192


class Endpoint:
    """An ASGI app for one path: a handler for each method, and errors turned into answers."""

    def __init__(self, state: State, path: str, handlers: dict[str, Handler], *, absent: bool = False):
        self._state, self._path, self._handlers, self._absent = state, path, handlers, absent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        status, began = 200, time.perf_counter()
        try:
            handle = self._handlers.get(scope["method"])
            if handle is None:
                raise self._refusal(scope)
            await handle(self._state, scope, receive, send)
        except ApiError as error:
            status = error.status
            await self._state.respond(send, status, error.body(), headers=error.headers())
        except Exception:
            status = 500
            logger.exception("a mistake of ours, in %s", self._path)
            failure = ApiError(500, "the server made a mistake; its log says which", code="internal_error", close=True)
            await self._state.respond(send, status, failure.body(), headers=failure.headers())
        finally:
            self._state.metrics.answered(self._path, status)
            if logger.isEnabledFor(logging.INFO):
                took = 1e3 * (time.perf_counter() - began)
                logger.info("%s %s: %d in %.1f ms", scope["method"], self._path, status, took)

    def _refusal(self, scope: Scope) -> ApiError:
        path = scope["path"][:80]
        if self._absent:
            return ApiError(404, f"there is nothing at {path}: see /docs")
        return ApiError(405, f"{scope['method']} is not for {path}", allow=", ".join(self._handlers))


def routes(state: State) -> list[Route]:
    """Return all routes."""
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat_completions),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{model:path}", model),
        ("POST", "/tokenize", tokenize),
        ("POST", "/detokenize", detokenize),
        ("GET", "/health", health),
        ("GET", "/metrics", metrics),
        ("GET", "/version", version),
        ("GET", "/openapi.json", description),
        ("GET", "/docs", docs),
        ("GET", "/", front),
    ]
    return [
        Route(path, Endpoint(state, path, dict.fromkeys(("GET", "HEAD") if method == "GET" else (method,), handle)))
        for method, path, handle in table
    ]


# --- generating -------------------------------------------------------------------------------------------------------


async def completions(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer POST /v1/completions."""
    began = time.perf_counter()
    state.require_ready()
    asked = decode(await read_body(state, scope, receive), CompletionRequest)
    _check(state, asked)
    prompts, n = prompts_of(asked.prompt, state.admission.places), asked.n or 1
    echoes, nothing = bool(asked.echo), wants_nothing(asked)
    count = (0 if nothing else n * len(prompts)) + (len(prompts) if echoes and asked.logprobs is not None else 0)
    with_places = _Places(state, count)
    async with with_places:
        ids = await encoded(state, prompts)
        texts = _texts(state, prompts) if echoes else []
        made = _asked(state, asked, ids, texts, asked.logprobs, began)
        made.echoes, made.nothing = echoes, nothing
        await _answer(state, scope, receive, send, made, Completions, with_places)


async def chat_completions(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer POST /v1/chat/completions."""
    began = time.perf_counter()
    state.require_ready()
    asked = decode(await read_body(state, scope, receive), ChatRequest)
    _check(state, asked)
    nothing = wants_nothing(asked)
    with_places = _Places(state, 0 if nothing else asked.n or 1)
    async with with_places:
        text, stops = state.template.render(chat.conversation(asked.messages))
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        ids = await encoded(state, [text], "messages")
        made = _asked(state, asked, ids, [], logprobs, began, stops)
        made.nothing = nothing
        await _answer(state, scope, receive, send, made, Chat, with_places)


class _Places:
    """Places for a request, returned at exit unless a `Generation` has taken them over."""

    def __init__(self, state: State, count: int):
        self._admission, self._count = state.admission, count

    async def __aenter__(self) -> None:
        self._admission.take(self._count)

    async def __aexit__(self, *error: object) -> None:
        self._admission.give_back(self._count)

    def handed_over(self) -> None:
        """Leave the places to the `Generation`."""
        self._count = 0


def _check(state: State, asked: Sampling) -> None:
    check_model(state, asked.model)
    refuse_unsupported(asked)


def _asked(
    state: State, asked: Sampling, ids: list[list[int]], texts: list[str], logprobs: int | None, began: float,
    stops: tuple[str, ...] = (),
) -> Asked:  # fmt: skip
    context = state.backend.config.n_positions
    # A prompt that fills the context leaves room for one token, which needs no position.
    rooms = [max(1, context - len(one)) for one in ids]
    vocab = state.backend.config.vocab_size
    known = {room: params_of(asked, room=room, vocab=vocab, logprobs=logprobs, stops=stops) for room in set(rooms)}
    return Asked(
        texts=texts,
        ids=ids,
        params=[known[room] for room in rooms],
        n=asked.n or 1,
        streamed=bool(asked.stream),
        nothing=False,
        echoes=False,
        logprobs=logprobs,
        interval=asked.stream_interval,
        returns_ids=bool(asked.return_token_ids),
        wants_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        wants_timings=bool(asked.return_timings),
        began=began,
    )


async def _answer(
    state: State, scope: Scope, receive: Receive, send: Send, asked: Asked, style: type[Style], places: _Places
) -> None:
    state.require_ready()  # it may have changed while the body arrived
    metrics = state.metrics
    metrics.prompt_tokens += sum(map(len, asked.ids))
    metrics.asked_n.observe(asked.n)
    metrics.asked_tokens.observe(asked.params[0].max_tokens)
    generation = Generation(state, asked, style(state.name, usage=asked.wants_usage))
    generation.abort = scope.get("warpline.abort")
    places.handed_over()
    await generation.run(receive, send)


async def encoded(state: State, prompts: list[str] | list[list[int]], param: str = "prompt") -> list[list[int]]:
    """Return the ids of all prompts; one that does not fit the context raises an error."""
    tokenizer, context, vocab = state.backend.tokenizer, state.backend.config.n_positions, len(state.table.escaped)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        if len(text) > context * state.table.longest:  # longer than the context without being encoded
            raise _too_long(f"more than {context:,}", context, param)
    try:
        if sum(map(len, texts)) > LONG:
            found = await asyncio.to_thread(tokenizer.encode_many, texts, special=True)
        elif texts:
            found = [tokenizer.encode(text, special=True) for text in texts]
        else:
            found = [prompt for prompt in prompts if isinstance(prompt, list)]
    except ConfigError as error:
        raise bad(str(error), param) from None
    for ids in found:
        if not ids:
            raise bad("the prompt is empty: give a text; <|endoftext|> starts from nothing", param)
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab:
            raise bad(f"prompt holds something that is no token id below {vocab:,}", param)
        if len(ids) > context:
            raise _too_long(f"{len(ids):,}", context, param)
    return found


def _texts(state: State, prompts: list[str] | list[list[int]]) -> list[str]:
    decode = state.backend.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt, special=True) for prompt in prompts]


def _too_long(tokens: str, context: int, param: str) -> ApiError:
    message = f"the prompt has {tokens} tokens, but the model's context is {context:,}: shorten it"
    return bad(message, param, "context_length_exceeded")


# --- the rest ---------------------------------------------------------------------------------------------------------


async def models(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET /v1/models."""
    state.require_ready()
    await _json(send, {"object": "list", "data": [_model(state)]})


async def model(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET /v1/models/{id}."""
    state.require_ready()
    check_model(state, scope["path_params"]["model"])
    await _json(send, _model(state))


async def tokenize(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer POST /tokenize."""
    state.require_ready()
    asked = decode(await read_body(state, scope, receive), TokenizeRequest)
    check_model(state, asked.model)
    tokenizer = state.backend.tokenizer
    try:
        if len(asked.prompt) > LONG:
            (ids,) = await asyncio.to_thread(tokenizer.encode_many, [asked.prompt], special=True)
        else:
            ids = tokenizer.encode(asked.prompt, special=True)
    except ConfigError as error:
        raise bad(str(error), "prompt") from None
    found = {"count": len(ids), "max_model_len": state.backend.config.n_positions, "tokens": ids}
    names = [state.table.name(token) for token in ids] if asked.return_token_strs else None
    await _json(send, {**found, "token_strs": names})


async def detokenize(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer POST /detokenize."""
    state.require_ready()
    asked = decode(await read_body(state, scope, receive), DetokenizeRequest)
    check_model(state, asked.model)
    vocab = len(state.table.escaped)
    if not all(0 <= token < vocab for token in asked.tokens):
        raise bad(f"tokens holds something that is no token id below {vocab:,}", "tokens")
    await _json(send, {"prompt": state.backend.tokenizer.decode(asked.tokens, special=True)})


async def health(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET /health: 200 if requests are taken, else 503 with the reason."""
    found = {"status": state.status} | ({"reason": state.why} if state.why else {})
    if state.status == "ok":
        await _json(send, found)
    else:
        state.metrics.answered("/health", 503)
        await state.respond(send, 503, msgspec.json.encode(found), headers=[(b"retry-after", b"1")])


async def metrics(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET /metrics."""
    state.require_ready()
    body = state.metrics.render(state.name, state.gauges()).encode()
    await state.respond(send, 200, body, b"text/plain; version=0.0.4; charset=utf-8")


async def version(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET /version."""
    await _json(send, {"version": __version__})


async def description(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET /openapi.json."""
    await state.respond(send, 200, openapi.document())


async def docs(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET /docs."""
    body, headers = openapi.readable()
    await state.respond(send, 200, body, b"text/html; charset=utf-8", headers)


async def front(state: State, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer GET / with the page."""
    body, headers = page()
    await state.respond(send, 200, body, b"text/html; charset=utf-8", headers)


def check_model(state: State, name: str | None) -> None:
    """Raise if the request names another model: this one must not answer it."""
    if name is not None and name != state.name:
        message = f"there is no model '{name[:80]}' here: this server has '{state.name}'"
        raise ApiError(404, message, param="model", code="model_not_found")


def _model(state: State) -> dict[str, Any]:
    return {
        "id": state.name,
        "object": "model",
        "created": state.created,
        "owned_by": "warpline",
        "max_model_len": state.backend.config.n_positions,
        "dtype": state.backend.dtype,
        "kv_dtype": state.backend.kv_dtype,
        "device": state.backend.device.name,
        "chat_template": state.template.name,
    }


async def _json(send: Send, found: Any) -> None:
    await State.respond(send, 200, msgspec.json.encode(found))


async def read_body(state: State, scope: Scope, receive: Receive) -> bytes:
    """Return the body; raise if it is too large or too slow."""
    most = state.settings.max_body
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or int(value[:20]) > most):
            raise _too_large(most)
        if name == b"content-encoding" and value not in (b"identity", b""):
            raise ApiError(415, "compressed bodies are not supported", close=True)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the request was not finished", close=True)
                part = message.get("body", b"")
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", close=True) from None


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most:,} bytes: shorten it, or split it", close=True)
