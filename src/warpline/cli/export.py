"""`warpline export`: write a model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warpline.config import WEIGHT_BYTES
from warpline.errors import one_of


def export(
    model: Annotated[
        str, typer.Argument(help="A name from 'warpline models', random:…, a folder, a file or a hub id.")
    ],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    dtype: Annotated[str, typer.Option(help="fp32, fp16, bf16, or int8 (for Warpline alone).")] = "fp16",
) -> None:
    """Write a model as a Hugging Face folder. It holds config, safetensors and tokenizer; `transformers` loads it as it
    is, unless its weights are int8."""
    one_of(dtype, WEIGHT_BYTES, "dtype")

    from warpline.model import weights
    from warpline.model.export import export as write
    from warpline.model.export import require_empty

    require_empty(folder)
    for path in write(weights.load(model, dtype=dtype), folder):
        size = path.stat().st_size
        typer.echo(f"{path}  {size / 1e6:,.1f} MB" if size >= 1e5 else f"{path}  {size / 1e3:,.1f} kB")
