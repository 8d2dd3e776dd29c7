"""`warpline models`: lists what can be run by name."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from warpline.config import FAMILY, ModelConfig
from warpline.model import builtin, cost, parameters
from warpline.model.builtin import BUILTIN
from warpline.tables import say, show

#: Dtypes of weights that differ in size.
DTYPES = ("fp32", "fp16", "int8")


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models that have a name. Shows their sizes and the bytes one decoded token must read."""
    rows = [_row(name, builtin.config(name), None) for name in BUILTIN]
    rows += [_row(name, config, hub_id) for name, (hub_id, config) in FAMILY.items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return

    show(
        ("name", "layers", "width", "heads", "parameters", *DTYPES),
        [
            (
                row["name"],
                str(row["n_layer"]),
                str(row["n_embd"]),
                str(row["n_head"]),
                f"{row['parameters'] / 1e6:,.1f} M",
                *(f"{row['bytes_per_token'][dtype] / 1e6:,.1f}" for dtype in DTYPES),
            )
            for row in rows
        ],
        least=("heads", "width", "layers"),
    )
    say(
        f"\n{', '.join(DTYPES)}: MB that one decoded token must read, about what the weights take.\n"
        + "".join(f"{name} is built in: {what}.\n" for name, what in BUILTIN.items())
        + "The others come from the Hugging Face hub. Also: a folder, a .safetensors file, any hub id, or random "
        "weights: random:gpt2, random:gpt2-xl,seed=3, random:n_layer=2,n_head=2,n_embd=128."
    )


def _row(name: str, config: ModelConfig, hub_id: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "hub_id": hub_id,
        "n_layer": config.n_layer,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_positions": config.n_positions,
        "parameters": parameters.count(config),
        "bytes_per_token": {dtype: cost.total_bytes(cost.decode(config, dtype)) for dtype in DTYPES},
        "weight_bytes": {dtype: cost.weight_bytes(config, dtype) for dtype in DTYPES},
    }
