"""The ASGI app. Any server that speaks ASGI can run it; `run.serve` does with uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from warpline.serve.errors import ApiError
from warpline.serve.guard import Guard
from warpline.serve.routes import routes
from warpline.serve.state import Settings, State

if TYPE_CHECKING:
    from warpline.serve.backend import Backend


def create_app(
    backend: Backend | Callable[[], Backend],
    settings: Settings | None = None,
    *,
    attached: Callable[[], None] | None = None,
    failed: Callable[[Exception], None] | None = None,
) -> Starlette:
    """The server as an ASGI app.

    `backend` is an `LLM`, or whatever has what `serve.backend.Backend` says (a mock engine that measures the server
    alone, for example), or a function without arguments that makes one. A function is called in a thread when the
    server starts: until it returns, /health and everything else answer 503. Then `attached` is called, or `failed`
    with what it raised.
    `app.state.server` is the server's `State`.
    """
    state = State(settings or Settings())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loading = None
        if callable(backend):
            loading = loop.create_task(_load(state, backend, attached, failed))
        else:
            state.attach(backend, loop)
        yield
        if loading is not None and not loading.done():
            loading.cancel()
        await state.close()

    middleware = []
    if state.settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(state.settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
        )
    middleware.append(Middleware(Guard, state=state))
    app = Starlette(
        routes=routes(state),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: _refused, 405: _refused},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


async def _load(
    state: State,
    make: Callable[[], Backend],
    attached: Callable[[], None] | None,
    failed: Callable[[Exception], None] | None,
) -> None:
    try:
        state.attach(await asyncio.to_thread(make), asyncio.get_running_loop())
    except Exception as error:
        state.status, state.why = "failed", "the model could not be loaded"
        if failed is None:
            raise
        failed(error)
        return
    if attached is not None:
        attached()


def _refused(request: Request, error: Exception) -> Response:
    """There is no such path, or it has no such method."""
    assert isinstance(error, HTTPException)
    request.app.state.server.metrics.answered("other", error.status_code)
    path = request.url.path[:80]
    said = (
        f"there is nothing at {path}: see /docs" if error.status_code == 404 else f"{request.method} is not for {path}"
    )
    answer = ApiError(error.status_code, said)
    return Response(answer.body(), error.status_code, headers=error.headers, media_type="application/json")
