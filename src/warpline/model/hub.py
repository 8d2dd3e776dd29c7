"""Downloads a model's files from the Hugging Face hub."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from warpline.config import FAMILY
from warpline.errors import ModelError, nearest
from warpline.model.builtin import BUILTIN


@functools.cache  # config, dtype and weights are read separately
def download(model: str) -> Path:
    """Return the folder with a model's files, downloaded if they are not in the hub's cache."""
    repo = FAMILY[model][0] if model in FAMILY else model
    if model not in FAMILY and not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        names = (*BUILTIN, *FAMILY)
        raise ModelError(
            f"unknown model '{model}'{nearest(model, names)}: give a folder, a .safetensors file, a hub id "
            f"(owner/name), random:gpt2, or one of {', '.join(names)}"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(f"downloading '{model}' needs the hub extra: pip install 'warpline[hub]'") from None
    files = ["*.json", "*.jinja", "*.safetensors"]
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=files))
        if not any(folder.glob("*.safetensors")):  # older repositories; not downloaded where both exist
            folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=[*files, "pytorch_model.bin"]))
        return folder
    except Exception as error:  # the client raises its HTTP library's exceptions as well as its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"cannot download '{repo}' ({reason.rstrip('.')}): check the name and the network, or give a local folder"
        ) from error
