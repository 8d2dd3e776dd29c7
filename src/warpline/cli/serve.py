"""`warpline serve`: serves the OpenAI API over HTTP."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warpline.cli.common import Deterministic, Device, Dtype, KvDtype, Speculate, SpeculativeTable, SpeculativeTokens
from warpline.config import EngineConfig
from warpline.errors import ConfigError, one_of
from warpline.model.builtin import DEFAULT

if TYPE_CHECKING:
    from warpline.engine.llm import LLM
    from warpline.serve.state import State

_ENGINE = EngineConfig()
LEVELS = ("debug", "info", "warning", "error")


def serve(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A name from 'warpline models', random:…, a folder, a file or a hub id."),
    ] = DEFAULT,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network, so set a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; can be repeated. Others can see it in 'ps'.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of keys, one per line.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most sequences at once; default: what fits.")] = None,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; more are refused with 429.")] = 256,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request's body.")] = 4 << 20,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web page's origin that may call; can be repeated; '*' is any.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name by which the server may be called; can be repeated.")
    ] = None,
    chat_template: Annotated[str | None, typer.Option(help="A Jinja file, plain or dialogpt.")] = None,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for running requests after SIGTERM.")] = 30.0,
    device: Device = _ENGINE.device,
    dtype: Dtype = _ENGINE.dtype,
    kv_dtype: KvDtype = _ENGINE.kv_dtype,
    executor: Annotated[str, typer.Option(help="auto, or one by name.")] = _ENGINE.executor,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: all cores.")] = None,
    deterministic: Deterministic = _ENGINE.deterministic,
    speculate: Speculate = _ENGINE.speculate,
    speculative_tokens: SpeculativeTokens = _ENGINE.speculative_tokens,
    speculative_table: SpeculativeTable = _ENGINE.speculative_table,
    replicas: Annotated[
        str | None,
        typer.Option(help="Number of models behind one address, run by Ray, or auto: pip install 'warpline[ray]'."),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a running Ray cluster (auto finds it); default: one on this machine.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Serve a model over HTTP. OpenAI's API at /v1, a page at /, Prometheus' metrics at /metrics."""
    log = logging.getLogger("warpline")
    log.setLevel(min(log.level, getattr(logging, one_of(log_level, LEVELS, "log level").upper())))  # --debug says all
    for name in ("uvicorn", "asyncio"):
        logging.getLogger(name).handlers = list(log.handlers)
    if not 0 <= shutdown_timeout <= 86_400:
        raise ConfigError(f"shutdown-timeout must be between 0 and 86400 seconds, not {shutdown_timeout:g}")
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, not {port}")
    engine = asdict(
        EngineConfig(
            device=device, dtype=dtype, kv_dtype=kv_dtype, executor=executor, max_batch=max_batch, threads=threads,
            deterministic=deterministic, speculate=speculate, speculative_tokens=speculative_tokens,
            speculative_table=speculative_table,
        )
    )  # fmt: skip
    if replicas is not None and speculate != _ENGINE.speculate:
        raise ConfigError("--speculate is for one process so far: leave --replicas out")
    # OpenMP reads it when torch is imported. Otherwise its threads spin for milliseconds after a prompt, on the cores
    # that the event loop and the engine's own threads need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from warpline.serve import run
        from warpline.serve.state import Settings
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'warpline[serve]'") from None
    keys = (*(api_key or ()), *_keys(api_key_file))
    settings = Settings(
        name=served_model_name,
        api_keys=keys,
        max_queue=max_queue,
        max_body=max_body,
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        chat_template=chat_template,
    )
    if not run.is_loopback(host) and not keys:
        _say(f"note: {host} can be reached from other machines, and there is no --api-key")
    if replicas is not None:
        from warpline.scale import online

        _say(f"starting replicas of {model}")
        online.serve(
            model, settings, engine,
            replicas=replicas, address=ray_address, host=host, port=port, shutdown_timeout=shutdown_timeout,
            ready=lambda url, what: _at(f"{model}, {what},", url),
        )  # fmt: skip
        return
    if ray_address is not None:
        raise ConfigError("--ray-address is for --replicas: say how many")

    def load() -> LLM:
        _say(f"loading {model}")
        from warpline.engine.llm import LLM

        llm = LLM(model, **engine)
        llm.warm_up()
        return llm

    run.serve(
        load, settings, host=host, port=port, shutdown_timeout=shutdown_timeout, log_level=log_level, ready=_ready
    )


def _ready(url: str, state: State) -> None:
    backend = state.backend
    _at(f"{state.name} ({backend.dtype}, {backend.device.name}, {backend.max_batch} at once)", url)


def _at(what: str, url: str) -> None:
    _say(f"{what} at {url}")
    _say(f"OpenAI's API: base_url {url}/v1 · its description: {url}/docs · Ctrl-C ends")


def _say(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _keys(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error}") from error
    if not found:
        raise ConfigError(f"{file} has no API key: write one into it, or leave out --api-key-file")
    return found
