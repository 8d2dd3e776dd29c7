"""One replica: a model, and the very app of `warpline serve` around it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from warpline.config import SWITCH_SECONDS, SamplingParams
from warpline.errors import DeviceError
from warpline.serve.app import App, create_app
from warpline.serve.state import Settings

if TYPE_CHECKING:
    from warpline.engine.llm import LLM


def loaded(model: str, engine: dict[str, Any]) -> LLM:
    """A model that has written a token: everything is compiled, and the memory taken."""
    from warpline.engine.llm import LLM

    llm = LLM(model, **engine)
    llm.generate([0], SamplingParams(max_tokens=2))
    return llm


class Replica:
    """What Ray Serve makes one of for each replica, in a process of its own."""

    def __init__(self, model: str, engine: dict[str, Any], settings: Settings):
        sys.setswitchinterval(SWITCH_SECONDS)
        self._llm, self._settings = loaded(model, engine), settings
        self._app: App | None = None

    def __serve_build_asgi_app__(self) -> App:
        self._app = create_app(self._llm, self._settings)
        return self._app

    def check_health(self) -> None:
        """Ray asks every few seconds, and replaces a replica that raises three times in a row."""
        if self._app is not None and self._app.server.status == "failed":
            raise DeviceError(f"the engine has failed: {self._app.server.why}")
