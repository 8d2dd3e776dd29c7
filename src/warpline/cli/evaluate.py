"""`warpline eval`: measures how well a model predicts a text, and what a smaller dtype changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from warpline.cli.common import chosen
from warpline.config import WEIGHT_BYTES, EngineConfig
from warpline.errors import ConfigError
from warpline.model.builtin import DEFAULT
from warpline.progress import progress
from warpline.tables import say, show

#: The text that is read if none is given.
_TEXT = (
    "Once upon a time there was a little fox who lived at the edge of a quiet forest. Every morning she went to the "
    "river to drink, and every morning the old heron asked her the same question. One day she did not know the answer."
)


def evaluate(
    model: Annotated[str, typer.Argument(help="As for generate --model.")] = DEFAULT,
    dtype: Annotated[
        str, typer.Option(help="One or more, separated by commas; all are compared with the first.")
    ] = "fp32,int8",
    kv_dtype: Annotated[
        str | None, typer.Option(help="int8: each dtype a second time, with a KV cache of int8 codes.")
    ] = None,
    executor: Annotated[str, typer.Option(help="auto, or one by name; on a CPU torch has an int8 KV cache.")] = "auto",
    text: Annotated[Path | None, typer.Option(help="A text file to predict.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of the text.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how well each dtype predicts a text. Reports perplexity, bits per character, agreement of the likeliest
    tokens and divergence from the first dtype."""
    dtypes = chosen(dtype, list(WEIGHT_BYTES), "dtype")
    EngineConfig(device=device, kv_dtype=kv_dtype)
    kinds = [None] if kv_dtype is None else [None, kv_dtype]
    try:
        words = _TEXT if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text}: {getattr(error, 'strerror', None) or error}") from error
    if not words.strip():
        raise ConfigError(f"{text} is empty: give a text to predict")

    with progress(f"Loading {model}"):
        from warpline import LLM
        from warpline.engine.check.evaluate import evaluate as compare

        engines = [
            LLM(model, device=device, dtype=name, kv_dtype=kind, executor=executor) for name in dtypes for kind in kinds
        ]
    ids = engines[0].tokenizer.encode(words)[:tokens]
    with progress("Predicting", len(ids)) as advance:
        found = [one.as_dict() for one in compare(engines, [engines[0].tokenizer.decode(ids)], tick=advance)]
    if as_json:
        typer.echo(json.dumps({"model": model, "rows": found}, indent=1))
        return
    show(("dtype", "tokens", "perplexity", "bits per character", "same likeliest token", "KL (nats)"), [
        (
            str(row["dtype"]),
            f"{row['tokens']:,}",
            f"{row['perplexity']:.4f}",
            f"{row['bits_per_character']:.4f}",
            f"{100 * float(row['top1_agreement']):.2f} %",
            f"{row['kl_nats']:.2e}",
        )
        for row in found
    ])  # fmt: skip
    if text is None:
        say(f"{found[0]['tokens']} tokens are an impression: --text FILE measures.")
