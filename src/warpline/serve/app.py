"""The ASGI app. Any ASGI server can run it; `run.Server` does so with uvicorn.

It uses Starlette's routes without its application class, which wraps every sent event in two more calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from warpline.serve.guard import Guard
from warpline.serve.routes import Endpoint, routes
from warpline.serve.state import Settings, State

if TYPE_CHECKING:
    from warpline.serve.backend import Backend


class App:
    """The result of `create_app`: call it with ASGI's scope, receive and send. `server` is the server's state."""

    def __init__(self, app: ASGIApp, server: State):
        self._app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or handle the server's lifespan events."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        await self._app(scope, receive, send)


def create_app(
    backend: Backend | Callable[[], Backend],
    settings: Settings | None = None,
    *,
    attached: Callable[[], None] | None = None,
    failed: Callable[[Exception], None] | None = None,
) -> App:
    """The server as an ASGI app.

    `backend` is an `LLM`, or anything that implements `serve.backend.Backend` (for example a mock engine that measures
    the server alone), or a function without arguments that returns one. A function is called in a thread when the
    server starts: until it returns, /health and everything else answer 503. Then `attached` is called, or `failed`
    with the exception it raised.
    """
    state = State(settings or Settings())

    @asynccontextmanager
    async def lifespan(_: Router) -> AsyncIterator[None]:
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

    nowhere = Endpoint(state, "other", {}, absent=True)
    app: ASGIApp = Router(routes(state), redirect_slashes=False, default=nowhere, lifespan=lifespan)
    app = Guard(app, state)
    if state.settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return App(app, state)


async def _load(
    state: State,
    make: Callable[[], Backend],
    attached: Callable[[], None] | None,
    failed: Callable[[Exception], None] | None,
) -> None:
    try:
        state.attach(await _made(make), asyncio.get_running_loop())
    except Exception as error:
        state.status, state.why = "failed", "the model could not be loaded"
        if failed is None:
            raise
        failed(error)
        return
    if attached is not None:
        attached()


async def _made(make: Callable[[], Backend]) -> Backend:
    """Run `make` in a daemon thread and return its result; unlike a pool's threads, it does not delay the exit."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Backend] = loop.create_future()

    def tell(done: Callable[[Any], None], what: Any) -> None:
        if not found.done():
            done(what)

    def work() -> None:
        done: Callable[[Any], None] = found.set_result
        try:
            what: Any = make()
        except Exception as error:  # noqa: BLE001 - raised in the coroutine that waits
            done, what = found.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended meanwhile
            loop.call_soon_threadsafe(tell, done, what)

    threading.Thread(target=work, name="warpline-load", daemon=True).start()
    return await found
