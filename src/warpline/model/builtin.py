"""The models that are part of the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from warpline.config import ModelConfig

#: Name → one line about the model. Its files are under data/<name>.
BUILTIN = {"stories": "short children's stories in English, trained for this package"}
DEFAULT = "stories"


def folder(name: str) -> Path:
    """Return the folder with a built-in model's config.json and weights."""
    return Path(str(resources.files("warpline.model").joinpath("data", name)))


def config(name: str) -> ModelConfig:
    """Return a built-in model's config."""
    return ModelConfig.from_hf(json.loads((folder(name) / "config.json").read_text(encoding="utf-8")), name)
