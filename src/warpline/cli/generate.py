"""`warpline generate`: write text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpline.cli.common import (
    Device,
    Dtype,
    FrequencyPenalty,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Speculate,
    SpeculativeTable,
    SpeculativeTokens,
    Temperature,
    TopK,
    TopP,
)
from warpline.config import EngineConfig, SamplingParams
from warpline.errors import ConfigError
from warpline.hardware import wake_gpu
from warpline.model.builtin import DEFAULT

if TYPE_CHECKING:
    from warpline.engine.llm import LLM
    from warpline.engine.text import Completion

#: The defaults have one home: the dataclasses.
_SAMPLING = SamplingParams()
_ENGINE = EngineConfig()


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; '-' or nothing reads it from stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A name from 'warpline models', random:…, a folder, a file or a hub id."),
    ] = DEFAULT,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", help="Tokens to generate at most.")
    ] = _SAMPLING.max_tokens,
    temperature: Temperature = _SAMPLING.temperature,
    top_k: TopK = _SAMPLING.top_k,
    top_p: TopP = _SAMPLING.top_p,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the likeliest.")] = _SAMPLING.min_p,
    repetition_penalty: RepetitionPenalty = _SAMPLING.repetition_penalty,
    presence_penalty: PresencePenalty = _SAMPLING.presence_penalty,
    frequency_penalty: FrequencyPenalty = _SAMPLING.frequency_penalty,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; can be repeated.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Number of completions.")] = _SAMPLING.n,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    executor: Annotated[
        str, typer.Option(help="auto, torch, on a CPU cpu, on a GPU persistent, graph or kernels.")
    ] = _ENGINE.executor,
    window: Annotated[int | None, typer.Option(help="Attend to this many positions only.")] = None,
    threads: Annotated[int | None, typer.Option(help="On a CPU; all cores if not given.")] = None,
    speculate: Speculate = _ENGINE.speculate,
    speculative_tokens: SpeculativeTokens = _ENGINE.speculative_tokens,
    speculative_table: SpeculativeTable = _ENGINE.speculative_table,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text while it is generated.")] = True,
) -> None:
    """Continue a prompt. Prints the prompt and its continuation, then one line of statistics on stderr."""
    text = _read_prompt(prompt, file)
    params = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop or (),
        n=n,
    )
    # Settings are checked before torch is imported, so that a mistake is answered at once.
    drafts: dict[str, Any] = {
        "speculate": speculate, "speculative_tokens": speculative_tokens, "speculative_table": speculative_table,
    }  # fmt: skip
    EngineConfig(device=device, dtype=dtype, window=window, threads=threads, **drafts)
    wake_gpu(device)

    from warpline.engine.llm import LLM

    llm = LLM(model, device=device, dtype=dtype, executor=executor, window=window, threads=threads, **drafts)
    if stream and n == 1 and not as_json:
        completions = [_stream(llm, text, params)]
    else:
        completions = llm.generate(text, params)
        if as_json:
            _write(json.dumps(_as_object(llm, completions), ensure_ascii=False) + "\n")
        else:
            _write("\n".join(_titled(completions)))
    if not as_json:
        _write_statistics(llm, completions)


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None and prompt is not None:
        raise ConfigError("the prompt was given twice: as an argument and as --file")
    if file is not None:
        try:
            raw, where = file.read_bytes(), str(file)
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    elif prompt is None or prompt == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError('there is no prompt: warpline generate "Once upon a time", or pipe one in')
        raw, where = sys.stdin.buffer.read(), "standard input"
    else:
        raw, where = prompt.encode("utf-8", errors="surrogateescape"), "the prompt"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start}): convert it first") from None
    text = text.removesuffix("\n") if prompt is None or prompt == "-" else text  # the line's end, not the prompt's
    if not text:
        raise ConfigError(f"{where} is empty: give a text to continue; <|endoftext|> starts from nothing")
    return text


def _stream(llm: LLM, text: str, params: SamplingParams) -> Completion:
    stream = llm.stream(text, params)  # refuses before anything is printed
    _write(text)
    for piece in stream:
        _write(piece)
    _write("\n")
    assert stream.completion is not None
    return stream.completion


def _titled(completions: list[Completion]) -> list[str]:
    if len(completions) == 1:
        return [completions[0].prompt + completions[0].text + "\n"]
    return [f"--- {c.index + 1} of {len(completions)} ---\n{c.prompt}{c.text}\n" for c in completions]


def _as_object(llm: LLM, completions: list[Completion]) -> dict[str, Any]:
    first, *others = completions
    timings = completions[0].timings
    new_tokens = sum(len(c.token_ids) for c in completions)
    each = [{"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in completions]
    return {
        **each[0],
        "prompt_tokens": len(first.prompt_token_ids),
        "new_tokens": new_tokens,
        "seconds": round(timings.seconds, 6),
        "tokens_per_second": round(new_tokens / timings.seconds, 3),
        "first_token_seconds": round(first.timings.prefill_seconds, 6),
        "passes": timings.decode_steps,
        "tokens_per_pass": _rounded(timings.tokens_per_pass),
        "drafted": timings.drafted,
        "accepted": timings.accepted,
        "seed": first.seed,
        "model": llm.model,
        "executor": llm.executor.described,
        "dtype": llm.dtype,
        "device": llm.device.name,
        **({"completions": each} if others else {}),
    }


def _write_statistics(llm: LLM, completions: list[Completion]) -> None:
    timings = completions[0].timings
    tokens = sum(len(c.token_ids) for c in completions)
    parts = [f"{tokens} tokens in {timings.seconds:.2f} s", f"{tokens / timings.seconds:,.1f} tok/s"]
    if timings.drafted and timings.tokens_per_pass is not None:
        parts.append(f"{timings.tokens_per_pass:.2f} a pass, {timings.accepted / timings.drafted:.0%} of drafts right")
    bandwidth = timings.gb_per_second
    if bandwidth is not None:
        parts.append(f"{bandwidth:,.1f} GB/s")
        limit = llm.device.limit
        if limit is None:
            parts.append("% of limit n/a (run 'warpline doctor' once to measure it)")
        else:
            parts.append(f"{100 * bandwidth / limit[0]:.0f} % of the {limit[1]} {limit[0]:,.0f} GB/s")
    parts.append(f"{llm.model}, {llm.dtype}, {llm.executor.described} on {llm.device.name}")
    line = " · ".join(parts)
    if sys.stderr is not None:
        sys.stderr.write(f"\x1b[2m{line}\x1b[0m\n" if sys.stderr.isatty() else f"{line}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
