"""Runs the app with uvicorn: binds the socket, then loads the model, and drains at the end."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from warpline.config import SWITCH_SECONDS
from warpline.errors import ConfigError
from warpline.serve.app import App, create_app
from warpline.serve.connection import Connection
from warpline.serve.state import Settings, State

if TYPE_CHECKING:
    from warpline.serve.backend import Backend

logger = logging.getLogger(__name__)

#: Names of this machine that only its own programs can use.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Server(uvicorn.Server):
    """uvicorn's server for our app. The first signal lets running requests finish, the second ends them."""

    def __init__(self, app: App, *, shutdown_timeout: float = 30.0, log_level: str = "warning"):
        self.state: State = app.server
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level="debug" if log_level == "debug" else "error",  # as a warning it logs each request that is no HTTP
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        waiting = len(self.state.answers)
        if waiting:
            logger.warning("ending when %d request(s) have been answered; the next signal ends them", waiting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests and give running ones their time."""
        self.state.status = "draining"
        await super().shutdown(sockets)

    def run_on(self, listening: socket.socket) -> None:
        """Serve until `should_exit` is set."""
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self.serve(sockets=[listening]))


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
    """Serve until a signal comes; raise what `load` raised. `ready` is called with the URL when requests are taken."""
    if is_loopback(host) and not settings.allowed_hosts:
        settings = replace(settings, allowed_hosts=(*LOOPBACK, host.lower()))
    listening = bound(host, port)
    url = url_of(listening)
    logger.info("%s is open: /health says when the model is loaded", url)
    errors: list[BaseException] = []

    def failed(error: BaseException) -> None:
        errors.append(error)
        server.should_exit = True

    def attached() -> None:
        if ready is not None:
            ready(url, server.state)

    app = create_app(load, settings, attached=attached, failed=failed)
    server = Server(app, shutdown_timeout=shutdown_timeout, log_level=log_level)
    sys.setswitchinterval(SWITCH_SECONDS)
    server.run_on(listening)
    if errors:
        raise errors[0]


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach this host."""
    return host.lower() in ("localhost", "::1") or host.startswith("127.")


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason.lower()}): choose another --host or --port"
        ) from error


def url_of(listening: socket.socket) -> str:
    """Return the URL of the socket for clients."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
