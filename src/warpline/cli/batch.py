"""`warpline batch`: many prompts from a file into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warpline.cli.common import (
    NEW_TOKENS,
    Deterministic,
    Device,
    Dtype,
    KvDtype,
    RepetitionPenalty,
    Seed,
    Speculate,
    SpeculativeTable,
    SpeculativeTokens,
    Temperature,
    TopK,
    TopP,
    as_options,
)
from warpline.config import EngineConfig, SamplingParams
from warpline.model.builtin import DEFAULT

_ENGINE, _SAMPLING = EngineConfig(), SamplingParams()


def batch(
    prompts: Annotated[Path, typer.Argument(help="JSONL or Parquet: a prompt in each line, or OpenAI's batch format.")],
    out: Annotated[Path, typer.Argument(help="JSONL or Parquet, by its name; in the order of the prompts.")],
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A name from 'warpline models', random:…, a folder, a file or a hub id."),
    ] = DEFAULT,
    column: Annotated[str, typer.Option(help="The field, or column, with the prompt.")] = "prompt",
    max_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", NEW_TOKENS, help="Tokens to generate at most.")
    ] = _SAMPLING.max_tokens,
    temperature: Temperature = _SAMPLING.temperature,
    top_k: TopK = _SAMPLING.top_k,
    top_p: TopP = _SAMPLING.top_p,
    repetition_penalty: RepetitionPenalty = _SAMPLING.repetition_penalty,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a completion; can be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end of text.")] = False,
    seed: Seed = 0,
    replicas: Annotated[
        str | None, typer.Option(help="Number of models that Ray runs, or auto: pip install 'warpline[ray]'.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a running Ray cluster (auto finds it); default: one on this machine.")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most sequences at once; default: what fits.")] = None,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    kv_dtype: KvDtype = _ENGINE.kv_dtype,
    executor: Annotated[str, typer.Option(help="auto, or one by name.")] = _ENGINE.executor,
    threads: Annotated[int | None, typer.Option(help="CPU threads per replica; default: all cores.")] = None,
    deterministic: Deterministic = _ENGINE.deterministic,
    speculate: Speculate = _ENGINE.speculate,
    speculative_tokens: SpeculativeTokens = _ENGINE.speculative_tokens,
    speculative_table: SpeculativeTable = _ENGINE.speculative_table,
) -> None:
    """Complete every prompt of a file. A line's own settings (max_tokens, temperature, seed, …) override these; without
    one, its seed is --seed plus its position. The same command continues an interrupted run. Bad lines go to
    OUT.errors.jsonl."""
    from warpline.scale.batch import generate

    with as_options(max_tokens="--max-new-tokens"):
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            repetition_penalty=repetition_penalty, stop=tuple(stop or ()), ignore_eos=ignore_eos, seed=seed,
        )  # fmt: skip
    done = generate(
        prompts, out, model=model, params=params, column=column, replicas=replicas, ray_address=ray_address,
        max_batch=max_batch, device=device, dtype=dtype, kv_dtype=kv_dtype, executor=executor, threads=threads,
        deterministic=deterministic, speculate=speculate, speculative_tokens=speculative_tokens,
        speculative_table=speculative_table,
    )  # fmt: skip
    typer.echo(f"{done.good:,} texts with {done.tokens:,} tokens in {done.out} ({done.seconds:.1f} s)", err=True)
    if done.errors is not None:
        typer.echo(f"{done.bad:,} lines could not be answered: {done.errors} says why", err=True)
        if done.good == 0:
            raise typer.Exit(1)
