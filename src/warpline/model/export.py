"""Write a model as a Hugging Face folder that `transformers` loads as it is."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from warpline.errors import ModelError
from warpline.model.tokenizer import END_OF_TEXT
from warpline.model.weights import Weights, checkpoint


def export(weights: Weights, folder: Path) -> list[Path]:
    """Write config, weights and tokenizer into `folder`, which must be new or empty; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ModelError(f"{folder} is not empty: give a new folder, so that nothing is overwritten")
        (folder / "config.json").write_text(json.dumps(weights.config.to_hf(), indent=2) + "\n", encoding="utf-8")
        save_file(checkpoint(weights), folder / "model.safetensors", metadata={"format": "pt"})
        weights.tokenizer().save(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(weights), indent=2) + "\n")
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from error
    return sorted(folder.iterdir())


def _tokenizer_config(weights: Weights) -> dict[str, object]:
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return {"tokenizer_class": "GPT2Tokenizer", "model_max_length": weights.config.n_positions, **special}
