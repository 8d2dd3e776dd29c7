"""One replica: a model, and the app of `warpline serve` around it."""

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
    """Load a model and generate a token, so that everything is compiled and the memory is allocated."""
    from warpline.engine.llm import LLM

    llm = LLM(model, **engine)
    llm.generate([0], SamplingParams(max_tokens=2))
    return llm


class Replica:
    """The class that Ray Serve instantiates for each replica, in a process of its own."""

    def __init__(self, model: str, engine: dict[str, Any], settings: Settings):
        sys.setswitchinterval(SWITCH_SECONDS)
        self._llm, self._settings = loaded(model, engine), settings
        self._app: App | None = None

    def __serve_build_asgi_app__(self) -> App:
        self._app = create_app(self._llm, self._settings)
        return self._app

    def check_health(self) -> None:
        """Raise if the engine has failed. Ray calls this every few seconds, and replaces a replica after three
        failures."""
        if self._app is not None and self._app.server.status == "failed":
            raise DeviceError(f"the engine has failed: {self._app.server.why}")
