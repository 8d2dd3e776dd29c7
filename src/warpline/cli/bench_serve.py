"""`warpline bench serve`: measures a server that speaks the OpenAI protocol from a client's side."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpline.cli.common import NEW_TOKENS, PROMPT_TOKENS, listed, read_key
from warpline.config import EngineConfig
from warpline.errors import ConfigError, one_of
from warpline.model.builtin import DEFAULT
from warpline.serve.address import address_of
from warpline.tables import show

if TYPE_CHECKING:
    from warpline.bench.serving.load import Load
    from warpline.bench.serving.process import Server

_SWEEP = "Several, separated by commas, make a sweep."


def serve(
    url: Annotated[str | None, typer.Option(help="The server to measure; without it one is started.")] = None,
    mock: Annotated[
        bool, typer.Option("--mock", help="Start our server with an engine that computes nothing.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model to start, or the server's model to ask.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1, for a server that is started.")] = "auto",
    dtype: Annotated[str, typer.Option(help="The dtype of a server that is started.")] = "auto",
    requests: Annotated[int, typer.Option("--requests", "-r", min=1, help="Number of requests.")] = 64,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", "-c", help=f"Requests at once; 1,8 if not given. {_SWEEP}")
    ] = None,
    rate: Annotated[str | None, typer.Option(help=f"Requests per second, at random moments. {_SWEEP}")] = None,
    burstiness: Annotated[float, typer.Option(help="Arrivals of --rate: 1 is Poisson, less comes in bursts.")] = 1.0,
    prompt: Annotated[int, typer.Option(PROMPT_TOKENS, "--prompt", min=1, help="Tokens of a prompt.")] = 128,
    new: Annotated[int, typer.Option(NEW_TOKENS, "--new", min=1, help="Tokens of an answer.")] = 128,
    spread: Annotated[float, typer.Option(min=0, help="Spread of lengths: 0 is equal, 0.8 is as in real use.")] = 0.0,
    context: Annotated[int, typer.Option(min=8, help="Tokens of prompt and answer at most.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of lengths, words and arrival times.")] = 0,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    ids: Annotated[bool, typer.Option("--ids", help="Prompts as token ids instead of text.")] = False,
    body: Annotated[str | None, typer.Option(help="JSON with more fields for every request.")] = None,
    omit: Annotated[str | None, typer.Option(help="Fields that the server does not take.")] = None,
    goodput: Annotated[str | None, typer.Option(help="Goals in ms, as ttft:50,tpot:5,e2el:900.")] = None,
    warmups: Annotated[int | None, typer.Option(min=0, help="Warm-up requests; default: one for each at once.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer.")] = 300.0,
    ready: Annotated[float, typer.Option(min=0, help="Seconds for the server to be ready.")] = 60.0,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the server's API key.")] = None,
    label: Annotated[str | None, typer.Option(help="The server's name in rows.")] = None,
    library: Annotated[
        bool, typer.Option("--library", help="Then run LLM in this process over the same requests, and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object alone.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Write a picture (PNG or SVG).")] = None,
    save: Annotated[Path | None, typer.Option(help="Append the rows below this results folder.")] = None,
) -> None:
    """Measure a server: tokens/s, time to the first token (TTFT), time per token after it (TPOT), time of the whole
    (E2E), in ms, median and p99. If output is piped, its last line is a JSON object."""
    from warpline.bench.rows import append
    from warpline.bench.serving.client import Target
    from warpline.bench.serving.figures import goals
    from warpline.bench.serving.load import PATHS, Load
    from warpline.bench.serving.run import Asking, measured
    from warpline.progress import progress

    if url is not None and mock:
        raise ConfigError("--url is a server that runs and --mock starts one: give one of them")
    if (url is not None or mock) and (device, dtype) != ("auto", "auto"):
        raise ConfigError("--device and --dtype are of a model that is started: leave them out")
    if library and (url is not None or mock or api != "completions"):
        raise ConfigError("--library compares with the model of a server that is started here, asked for completions")
    EngineConfig(device=device, dtype=dtype)
    wanted = goals(goodput)
    key = read_key(api_key_file)
    base = Load(
        requests=requests, prompt=prompt, new=new, spread=spread, context=context, burstiness=burstiness, seed=seed,
        api=one_of(api, PATHS, "api"), ids=ids, omit=tuple(listed(omit)), body=_object(body),
    )  # fmt: skip
    if burstiness <= 0:
        raise ConfigError("--burstiness must be above 0")
    loads = _loads(base, concurrency, rate)
    if chart is not None:  # an error now, not after all measurements
        from warpline.bench.charts import canvas

        canvas(1, 1)
        if not chart.parent.is_dir():
            raise ConfigError(f"cannot write {chart}: there is no folder {chart.parent}")
    with ExitStack() as stack:
        server: Server | None = None
        if url is None:
            from warpline.bench.serving.process import Server

            model = model or DEFAULT
            server = stack.enter_context(Server(_command(mock, model, device, dtype)))
            label = label or ("mock" if mock else "warpline")
        target = Target(address_of(server.url if server is not None else url or ""), key)
        asking = Asking(model=model if url else None, label=label, warmups=warmups, timeout=timeout, patience=ready)
        with progress("Measuring", sum(load.requests for load in loads)) as advance:
            rows = measured(target, loads, asking, wanted, server=server, advance=advance)
    if library:
        from warpline.bench.serving.library import compared
        from warpline.bench.serving.library import measured as in_process

        found = (in_process(load, model or DEFAULT, device=device, dtype=dtype) for load in loads)
        rows = [compared(row, its) for row, its in zip(rows, found, strict=True)]
    if not as_json:
        _print(rows)
    if save is not None:
        append(save, "serve", rows)
    if chart is not None:
        from warpline.bench.serving.report import chart as draw

        try:
            draw(rows).savefig(chart, dpi=130)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {chart}: {error}") from error
    shown = {key: [row[key] for row in rows] for key in ("output_throughput", "median_ttft_ms") if key in rows[0]}
    if as_json or not sys.stdout.isatty():
        typer.echo(json.dumps({"rows": rows} if as_json else {"rows": len(rows), **shown}))
    if not any(row["completed"] for row in rows):
        raise ConfigError(f"no request was answered: {next(iter(rows[0]['errors']), 'none was sent')}")


def _command(mock: bool, model: str, device: str, dtype: str) -> list[str]:
    if mock:
        return ["-m", "warpline.bench.serving.mock", "--model", model]
    return ["-m", "warpline", "serve", "--model", model, "--device", device, "--dtype", dtype]


def _print(rows: list[dict[str, Any]]) -> None:
    from warpline.bench.serving.report import TITLES, cells, notes

    show(TITLES, [cells(row) for row in rows], least=("req/s",))
    typer.echo("".join(f"{line}\n" for row in rows for line in notes(row)), nl=False)


def _loads(base: Load, concurrency: str | None, rate: str | None) -> list[Load]:
    """Return a load for every combination of concurrency and rate."""
    many = [_number("concurrency", part) for part in listed(concurrency)]
    rates = [_number("rate", part) for part in listed(rate)]
    if any(count != int(count) for count in many):
        raise ConfigError("--concurrency takes whole numbers, separated by commas")
    if not rates:
        return [replace(base, concurrency=int(count)) for count in many or (1, 8)]
    return [
        replace(base, concurrency=None if count is None else int(count), rate=each)
        for each in rates
        for count in many or (None,)
    ]


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ConfigError(f"--{name} takes numbers above 0, separated by commas, not '{text}'")
    return value


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--body takes a JSON object, as in '{{\"top_p\": 0.9}}', not '{text}'")
    return found
