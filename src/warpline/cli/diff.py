"""`warpline diff`: finds where two executors, or one of them alone and in a batch, first compute different values."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from warpline.cli.common import NEW_TOKENS, PROMPT_TOKENS, Deterministic, Device, Dtype, KvDtype
from warpline.config import EngineConfig
from warpline.errors import ConfigError
from warpline.model.builtin import DEFAULT
from warpline.progress import progress

if TYPE_CHECKING:
    from warpline.engine.check.diff import Dependence, Difference

    Found = Difference | Dependence | None

_ENGINE = EngineConfig()
#: Batch sizes on both sides of the limits at which executors switch their methods.
BATCHES = (2, 3, 8, 9, 16, 64)


def diff(
    executor: Annotated[str, typer.Option("--executor", "-e", help="The executor to check.")],
    against: Annotated[str | None, typer.Option("--against", help="The reference; default: torch.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="As for generate.")] = DEFAULT,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = _ENGINE.kv_dtype,
    device: Device = "auto",
    prompt: Annotated[int, typer.Option(PROMPT_TOKENS, "--prompt", help="Tokens of the prompt.")] = 16,
    tokens: Annotated[int, typer.Option(NEW_TOKENS, "--tokens", help="Tokens to decode and compare.")] = 8,
    batch: Annotated[
        int | None,
        typer.Option("--batch", "-b", help="Sequences side by side; with --alone several sizes if not given."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random text that is decoded.")] = 0,
    alone: Annotated[
        bool, typer.Option("--alone", help="Compare batches with each of their sequences alone, bit by bit.")
    ] = False,
    deterministic: Deterministic = _ENGINE.deterministic,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the first op in which two executors differ. The same random text is decoded on both sides.

    Rounding does not count as a difference. With --alone, find the first op whose bits depend on the batch. Exits with
    1 if there is one.
    """
    batches: tuple[int, ...] = BATCHES if alone and batch is None else (1 if batch is None else batch,)
    for name, value in ((PROMPT_TOKENS, prompt), (NEW_TOKENS, tokens), ("--batch", batches[0])):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if alone and against is not None:
        raise ConfigError("--alone compares an executor with itself: leave --against out")
    engine = asdict(EngineConfig(device=device, dtype=dtype, kv_dtype=kv_dtype, deterministic=deterministic))

    import random

    with progress(f"Loading {model}"):
        from warpline import LLM
        from warpline.engine.check import diff as instrument

        ours = LLM(model, **engine | {"executor": executor})
    config = ours.config
    if prompt + tokens >= config.n_positions:
        raise ConfigError(f"{prompt} + {tokens} tokens do not fit into the model's context of {config.n_positions:,}")
    rng = random.Random(seed)
    texts = [[rng.randrange(config.vocab_size) for _ in range(prompt + tokens)] for _ in range(batches[-1])]
    if alone:
        most = ours.executor.most_lanes or batches[-1]
        batches = tuple(size for size in batches if size <= most) or batches  # the executor refuses too many
        found: Found = None
        with progress("Comparing", tokens * len(batches)) as advance:
            for size in batches:
                found = instrument.first_dependence(ours.executor, texts[:size], tokens, lambda: advance(1))
                if found is not None:
                    break
        same = f"each alone has the bits that it has among {', '.join(map(str, batches))}"
    else:
        theirs = LLM(model, **engine | {"executor": against or "torch", "deterministic": "off"})
        with progress("Comparing", tokens) as advance:
            found = instrument.compare(ours.executor, theirs.executor, texts, tokens, lambda: advance(1))
        same = f"no difference beyond rounding in {tokens} tokens of {batches[-1]} x {prompt + tokens}"
    if as_json:
        typer.echo(json.dumps({"differs": found is not None, **({} if found is None else asdict(found))}))
    else:
        typer.echo(f"{same}, {ours.dtype}" if found is None else str(found))
    if found is not None:
        raise typer.Exit(1)
