"""`warpline diff`: where two executors first compute something different."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warpline.cli.common import NEW_TOKENS, PROMPT_TOKENS, Device, Dtype
from warpline.errors import ConfigError
from warpline.model.builtin import DEFAULT
from warpline.progress import progress


def diff(
    executor: Annotated[str, typer.Option("--executor", "-e", help="The executor in question.")],
    against: Annotated[str, typer.Option("--against", help="The one that is taken to be right.")] = "torch",
    model: Annotated[str, typer.Option("--model", "-m", help="As for generate.")] = DEFAULT,
    dtype: Dtype = "auto",
    device: Device = "auto",
    prompt: Annotated[int, typer.Option(PROMPT_TOKENS, "--prompt", help="Tokens that go before.")] = 16,
    tokens: Annotated[int, typer.Option(NEW_TOKENS, "--tokens", help="Tokens to decode and compare.")] = 8,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences side by side.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of the random text that is decoded.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the first op in which two executors differ. Both decode the same random text; rounding is no difference.

    Exits with 1 if there is one.
    """
    for name, value in ((PROMPT_TOKENS, prompt), (NEW_TOKENS, tokens), ("--batch", batch)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")

    import random

    with progress(f"Loading {model}"):
        from warpline import LLM
        from warpline.engine.check.diff import compare

        ours, theirs = (LLM(model, device=device, dtype=dtype, executor=name) for name in (executor, against))
    config = ours.config
    if prompt + tokens >= config.n_positions:
        raise ConfigError(f"{prompt} + {tokens} tokens do not fit into the model's context of {config.n_positions:,}")
    rng = random.Random(seed)
    texts = [[rng.randrange(config.vocab_size) for _ in range(prompt + tokens)] for _ in range(batch)]
    with progress("Comparing", tokens) as advance:
        found = compare(ours.executor, theirs.executor, texts, tokens, lambda: advance(1))
    if as_json:
        what = {} if found is None else {name: getattr(found, name) for name in found.__slots__}
        typer.echo(json.dumps({"differs": found is not None, **what}))
    elif found is None:
        typer.echo(f"no difference beyond rounding in {tokens} tokens of {batch} x {prompt + tokens}, {ours.dtype}")
    else:
        typer.echo(str(found))
    if found is not None:
        raise typer.Exit(1)
