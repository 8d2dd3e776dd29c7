"""Runs the app with uvicorn: binds first, loads then, drains in the end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from warpline.errors import ConfigError
from warpline.serve.app import create_app
from warpline.serve.connection import Connection
from warpline.serve.state import Settings, State

if TYPE_CHECKING:
    from warpline.serve.backend import Backend

logger = logging.getLogger(__name__)

#: Names of this machine that only its own programs can use.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Server(uvicorn.Server):
    """The first signal lets what runs come to its end, the second does not wait for it."""

    state: State

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        waiting = len(self.state.answers)
        if waiting:
            logger.warning("shutting down when %d request(s) have ended; the next signal ends them", waiting)


def serve(
    load: Callable[[], Backend],
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    shutdown_timeout: float = 30.0,
    log_level: str = "warning",
    ready: Callable[[str, State], None] | None = None,
) -> None:
    """Serve until a signal comes. Raises what `load` raised. `ready` is called with the URL when requests are taken."""
    if is_loopback(host) and not settings.allowed_hosts:
        settings = replace(settings, allowed_hosts=(*LOOPBACK, host.lower()))
    listening = _bound(host, port)
    url = _url(listening)
    errors: list[BaseException] = []

    def failed(error: BaseException) -> None:
        errors.append(error)
        server.should_exit = True

    def loaded() -> Backend:
        backend = load()
        if ready is not None:
            asyncio.run_coroutine_threadsafe(_told(), loop_of[0])
        return backend

    async def _told() -> None:
        while server.state.status == "loading":
            await asyncio.sleep(0.005)
        if ready is not None and server.state.status == "ok":
            ready(url, server.state)

    loop_of: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loop_of.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    app = create_app(loaded, settings, failed=failed)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level=log_level,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
    )
    server = Server(config)
    server.state = app.state.server
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(main())
    if errors:
        raise errors[0]


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach it."""
    return host.lower() in ("localhost", "::1") or host.startswith("127.")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason.lower()}): choose another --host or --port"
        ) from error


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
