"""`warpline generate`: write text."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpline.cli.common import (
    NEW_TOKENS,
    Deterministic,
    Device,
    Dtype,
    FrequencyPenalty,
    KvDtype,
    PresencePenalty,
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
from warpline.errors import ConfigError
from warpline.hardware import cache_bytes, wake_gpu
from warpline.model.builtin import DEFAULT
from warpline.progress import progress

if TYPE_CHECKING:
    from warpline.engine.llm import LLM
    from warpline.engine.text import Completion, Timings

#: The defaults are defined in the dataclasses only.
_SAMPLING = SamplingParams()
_ENGINE = EngineConfig()
#: A compile time below this many seconds is not reported.
NOTHING = 0.05


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
        int, typer.Option("--max-new-tokens", "--max-tokens", NEW_TOKENS, help="Tokens to generate at most.")
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
    kv_dtype: KvDtype = _ENGINE.kv_dtype,
    executor: Annotated[
        str, typer.Option(help="auto, torch, on a CPU cpu, on a GPU persistent, graph or kernels.")
    ] = _ENGINE.executor,
    window: Annotated[int | None, typer.Option(help="Attend to this many positions only.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: all cores.")] = None,
    deterministic: Deterministic = _ENGINE.deterministic,
    speculate: Speculate = _ENGINE.speculate,
    speculative_tokens: SpeculativeTokens = _ENGINE.speculative_tokens,
    speculative_table: SpeculativeTable = _ENGINE.speculative_table,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text while it is generated.")] = True,
) -> None:
    """Continue a prompt. Prints the prompt and its continuation, then one line of statistics on stderr."""
    text = _read_prompt(prompt, file)
    with as_options(max_tokens="--max-new-tokens"):
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
        # Settings are checked before torch is imported, so that an error appears at once.
        engine = EngineConfig(
            device=device, dtype=dtype, kv_dtype=kv_dtype, executor=executor, window=window, threads=threads,
            deterministic=deterministic, speculate=speculate, speculative_tokens=speculative_tokens,
            speculative_table=speculative_table,
        )  # fmt: skip
    wake_gpu(device)

    with progress(f"Loading {model}"):
        from warpline.engine.llm import LLM

        llm = LLM(model, **asdict(engine))
    begun = time.perf_counter()
    llm.executor.ready()  # compile time does not count as speed
    waited = time.perf_counter() - begun
    if stream and n == 1 and not as_json:
        completions = [_stream(llm, text, params)]
    else:
        completions = llm.generate(text, params)
        if as_json:
            _write(json.dumps(_as_object(llm, completions, waited), ensure_ascii=False) + "\n")
        else:
            _write("\n".join(_titled(completions)))
    if not as_json:
        _write_statistics(_statistics(llm, completions, waited))


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
    text = text.removesuffix("\n") if prompt is None or prompt == "-" else text  # of the line, not of the prompt
    if not text:
        raise ConfigError(f"{where} is empty: give a text to continue; <|endoftext|> starts from nothing")
    return text


def _stream(llm: LLM, text: str, params: SamplingParams) -> Completion:
    stream = llm.stream(text, params)  # raises before anything is printed
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


def _as_object(llm: LLM, completions: list[Completion], waited: float) -> dict[str, Any]:
    first, *others = completions
    timings = completions[0].timings
    new_tokens, rate = sum(len(c.token_ids) for c in completions), _decode_rate(completions)
    each = [{"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in completions]
    return {
        **each[0],
        "prompt_tokens": len(first.prompt_token_ids),
        "new_tokens": new_tokens,
        "seconds": round(timings.seconds, 6),
        "tokens_per_second": round(new_tokens / timings.seconds, 3),
        "compile_seconds": round(waited, 6) if waited > NOTHING else 0.0,
        "first_token_seconds": round(timings.prefill_seconds, 6),
        "decode_tokens_per_second": _rounded(rate),
        "passes": timings.decode_steps,
        "tokens_per_pass": _rounded(timings.tokens_per_pass),
        "drafted": timings.drafted,
        "accepted": timings.accepted,
        "seed": first.seed,
        "model": llm.model,
        "executor": llm.executor.described,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "device": llm.device.name,
        **({"completions": each} if others else {}),
    }


def _decode_rate(completions: list[Completion]) -> float | None:
    """Return tokens per second after the first token of each text; None if there are none."""
    steps, seconds = sum(max(0, len(c.token_ids) - 1) for c in completions), completions[0].timings.decode_seconds
    return steps / seconds if steps and seconds else None


def _statistics(llm: LLM, completions: list[Completion], waited: float) -> list[str]:
    """Return statistics of decoding, prompt and compilation, the most important first; unknown ones are left out."""
    timings, rate = completions[0].timings, _decode_rate(completions)
    new, prompt = sum(len(c.token_ids) for c in completions), len(completions[0].prompt_token_ids)
    parts = [f"{new:,} new" + (f", {rate:,.1f} tok/s" if rate is not None else "")]
    if timings.drafted and timings.tokens_per_pass is not None:
        parts.append(f"{timings.tokens_per_pass:.2f} a pass, {timings.accepted / timings.drafted:.0%} of drafts right")
    bandwidth, limit = timings.gb_per_second, llm.device.limit
    if bandwidth is not None and limit is None:
        parts.append(f"{bandwidth:,.1f} GB/s")
    elif bandwidth is not None and limit is not None:
        parts.append(f"{bandwidth:,.1f} of {limit[0]:,.0f} GB/s" + _beyond(llm, timings, bandwidth / limit[0]))
    parts.append(f"prompt {prompt:,} in {1e3 * timings.prefill_seconds:,.0f} ms")
    if waited > NOTHING:
        parts.append(f"compiled in {waited:.1f} s")
    dtype = llm.dtype if llm.kv_dtype is None else f"{llm.dtype} with {llm.kv_dtype} KV"
    return [*parts, f"{llm.model} {dtype}, {llm.executor.described}"]


def _beyond(llm: LLM, timings: Timings, share: float) -> str:
    """Explain a bandwidth above the memory's limit."""
    if share <= 1:
        return ""
    cache, moved = cache_bytes(str(llm.executor.device)) or 0, timings.decode_bytes / max(1, timings.decode_steps)
    if moved < cache:
        return " (from caches)"
    # What a cache keeps from step to step takes no time at best.
    return " (partly from caches)" if share * (moved - cache) <= moved else " (run warpline doctor again)"


def _write_statistics(parts: list[str]) -> None:
    """Print one line; on a terminal, leave out the last parts if it does not fit."""
    if sys.stderr is None:
        return
    if not sys.stderr.isatty():
        sys.stderr.write(" · ".join(parts) + "\n")
        return
    width = shutil.get_terminal_size().columns
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts = parts[:-1]
    sys.stderr.write(f"\x1b[2m{' · '.join(parts)}\x1b[0m\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
