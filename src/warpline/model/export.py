"""Writes a model as a Hugging Face folder that `transformers` loads; only Warpline reads int8 weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from warpline.errors import ModelError
from warpline.model.quantise import FILE, SCALE
from warpline.model.tokenizer import END_OF_TEXT, FILES
from warpline.model.weights import Weights, checkpoint


def require_empty(folder: Path) -> None:
    """Raise if the folder has contents that could be overwritten."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from error
    if taken:
        raise ModelError(f"{folder} is not empty: give a new folder, so that nothing is overwritten")


def export(weights: Weights, folder: Path) -> list[Path]:
    """Write config, weights and tokenizer into `folder`, which must be new or empty; return the files.

    The folder is filled under a temporary name and then renamed, so a failure leaves nothing behind.
    """
    if weights.config.window is not None:
        raise ModelError("a model with a sliding window has no form that transformers understands: export it without")
    require_empty(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            partial = Path(scratch) / "model"
            partial.mkdir()
            _fill(partial, weights)
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
    except (OSError, SafetensorError, UnicodeError) as error:
        raise ModelError(f"cannot write {str(folder)!r}: {getattr(error, 'strerror', None) or error}") from error
    return sorted(folder.iterdir())


def _fill(folder: Path, weights: Weights) -> None:
    (folder / "config.json").write_text(json.dumps(weights.config.to_hf(), indent=2) + "\n", encoding="utf-8")
    name = FILE if "wte.weight" + SCALE in weights.tensors else "model.safetensors"
    save_file(checkpoint(weights), folder / name, metadata={"format": "pt"})
    (folder / name).chmod((folder / "config.json").stat().st_mode)  # save_file makes it readable by its owner only
    if (end := weights.config.eos_token_id) is not None:
        ends = {"_from_model_config": True, "bos_token_id": end, "eos_token_id": end}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
    own = [path for name in FILES for path in sorted(weights.folder.glob(name))] if weights.folder is not None else []
    for path in own:
        shutil.copy(path, folder / path.name)
    if not own:
        weights.tokenizer().save(folder)
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        length = weights.config.n_positions
        described = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": length, **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
