"""`warpline profile`: where methods spend their time; `warpline profile compare A B`: two sessions compared."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpline.bench.methods.names import INT8, METHODS
from warpline.cli.common import PROMPT_TOKENS, Device, chosen, listed, our_name
from warpline.config import WEIGHT_BYTES, EngineConfig
from warpline.errors import ConfigError, WarplineError, one_of
from warpline.profile.session import PHASES, Session, read, save, write

if TYPE_CHECKING:
    from warpline.profile.collect import ProfileRequest

logger = logging.getLogger(__name__)

_BOTH = "both"


def profile(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD[:DTYPE]… | SESSION.json | compare A B]",
            help=f"Of {', '.join(METHODS)}; torch if none is given. Or a session to show, or two to compare.",
        ),
    ] = None,
    phase: Annotated[str, typer.Option(help="prefill, decode or both.")] = _BOTH,
    model: Annotated[str | None, typer.Option("--model", "-m", help="random:gpt2 on a GPU, stories on a CPU.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp16 on a GPU, fp32 on a CPU; several, separated by commas, each in turn.")
    ] = None,
    device: Device = "auto",
    batch: Annotated[int, typer.Option(help="Number of sequences.")] = 1,
    context: Annotated[int, typer.Option(PROMPT_TOKENS, "--context", help="Tokens of the prompt.")] = 128,
    steps: Annotated[int, typer.Option(help="Decode steps to record.")] = 8,
    layers: Annotated[bool, typer.Option("--layers", help="Each layer apart instead of all merged.")] = False,
    kernels: Annotated[int, typer.Option(min=1, help="Most kernels in the table.")] = 10,
    shares: Annotated[bool, typer.Option("--shares", help="Model, block, attention, MLP: a table of each.")] = False,
    gpu: Annotated[str | None, typer.Option(help="Project the same work onto another card: t4, a100, h100 …")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the session, or the comparison, as JSON.")] = False,
    session: Annotated[Path | None, typer.Option(help="Write the session to this file (.json or .json.gz).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page, nothing fetched from elsewhere.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing (.json.gz).")
    ] = None,
    keep: Annotated[Path | None, typer.Option("--save", help="Save the session below this results folder.")] = None,
) -> None:
    """Say where the time goes, and what to do about it. Shows which module, which kernel and which kind of operation
    takes the time, and what bounds it."""
    words = words or []
    files = {"--session": session, "--html": html, "--md": md, "--trace": trace}
    for path in filter(None, files.values()):  # an error now, not after the recording
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if words[:1] == ["compare"]:
        _compare(words[1:], as_json, md)
        return
    phases = PHASES if one_of(phase, (*PHASES, _BOTH), "phase") == _BOTH else (phase,)
    show = partial(_show, as_json=as_json, merge=not layers, gpu=gpu, most=kernels, shares=shares)
    write_all = partial(_write, session=session, html=html, md=md, trace=trace, keep=keep, gpu=gpu)
    if len(words) == 1 and _is_file(words[0]):
        found = read(Path(words[0]))
        found = _only(found, phases) if phase != _BOTH else found
        _check_gpu(gpu, [found.dtype])
        write_all(found)
        show(found)
        return
    pairs = _pairs(words, dtype)
    wishes = _wishes(pairs, model, device, batch=batch, context=context, steps=steps, phases=phases)
    _check_gpu(gpu, [request.dtype for request in wishes])
    if len(wishes) > 1 and (alone := [name for name, path in files.items() if path] + ["--json"] * as_json):
        raise ConfigError(f"{alone[0]} is for one method, not {len(wishes)}: --save keeps several")
    for found in _recorded(wishes):
        write_all(found)
        show(found)


def _show(found: Session, *, as_json: bool, merge: bool, gpu: str | None, most: int, shares: bool) -> None:
    if as_json:
        from warpline.profile.session import dumps

        typer.echo(dumps(found))
        return
    from warpline.profile.render import console

    console.show(found, merge=merge, gpu=gpu, most=most, shares=shares)


def _check_gpu(gpu: str | None, dtypes: list[str]) -> None:
    """Raise for an unknown GPU before anything is recorded."""
    if gpu is not None:
        from warpline.profile.roofline import other_roofs

        for dtype in dtypes:
            other_roofs(gpu, dtype)


def _is_file(word: str) -> bool:
    return word not in METHODS and (word.endswith((".json", ".gz")) or Path(word).exists())


def _only(session: Session, phases: tuple[str, ...]) -> Session:
    from dataclasses import replace

    return replace(session, phases=tuple(session.phase(name) for name in phases))


def _pairs(words: list[str], dtype: str | None) -> list[tuple[str, str | None]]:
    """Return methods with their dtypes: "naive:fp32" names its own, others get those of --dtype, or None."""
    shared: list[str | None] = [*chosen(",".join(map(our_name, listed(dtype))), WEIGHT_BYTES, "dtype")] or [None]
    found: list[tuple[str, str | None]] = []
    for word in listed(",".join(words)) or ["torch"]:
        method, _, own = word.partition(":")
        one_of(method, METHODS, "method")
        found += [(method, one) for one in ([one_of(our_name(own), WEIGHT_BYTES, "dtype")] if own else shared)]
    return list(dict.fromkeys(found))


def _wishes(pairs: list[tuple[str, str | None]], model: str | None, device: str, **shape: Any) -> list[ProfileRequest]:
    EngineConfig(device=device)

    import torch

    from warpline.profile.collect import ProfileRequest

    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    on_gpu = target.startswith("cuda")
    return [
        ProfileRequest(
            method=f"{method}-int8" if dtype == "int8" and f"{method}-int8" in INT8 else method,
            model=model or ("random:gpt2" if on_gpu else "stories"),
            dtype=dtype or ("int8" if method in INT8 else "fp16" if on_gpu else "fp32"),
            device=target,
            **shape,
        )
        for method, dtype in pairs
    ]


def _recorded(wishes: list[ProfileRequest]) -> Iterator[Session]:
    """Yield the sessions one by one, recorded in one process. Of several methods, one that fails is reported and the
    others continue; at the end it is an error."""
    from warpline.bench.run import Bench
    from warpline.bench.workloads import Settings
    from warpline.profile.collect import collect
    from warpline.progress import progress

    bench = Bench(Settings(wishes[0].device))
    failed: list[str] = []
    for request in wishes:
        try:
            with progress(f"Profiling {request.label}", 2 + len(request.phases)) as advance:
                found = collect(request, advance, bench)
        except (RuntimeError, ImportError, ValueError, TypeError, WarplineError) as error:
            if len(wishes) == 1:
                raise
            logger.debug("%s failed", request.label, exc_info=True)
            typer.echo(f"{request.label}: {(str(error).splitlines() or [type(error).__name__])[0]}", err=True)
            failed.append(request.label)
        else:
            yield found
    if failed:
        raise ConfigError(f"{len(failed)} of {len(wishes)} methods were not profiled: {', '.join(failed)}")


def _write(
    found: Session,
    *,
    session: Path | None,
    html: Path | None,
    md: Path | None,
    trace: Path | None,
    keep: Path | None,
    gpu: str | None,
) -> None:
    if session is not None:
        save(found, session)
    if keep is not None:
        path = keep / kept_name(found)
        replaced = _described(path)
        save(found, path)
        if replaced is not None:
            typer.echo(f"{path} replaces {replaced}", err=True)
    if md is not None:
        from warpline.profile.render import markdown

        write(md, markdown.whole(found, gpu=gpu))
    if html is not None:
        from warpline.profile.render.html import page

        write(html, page(found, gpu=gpu))
    if trace is not None:
        from warpline.profile.render.chrome import trace as as_trace

        write(trace, as_trace(found))


def _described(path: Path) -> str | None:
    """Describe the session in this file by its time and commit; None if there is no file."""
    if not path.exists():
        return None
    try:
        origin = read(path).origin
    except ConfigError:
        return "a session that cannot be opened any more"
    return f"one of {origin.get('time', 'an unknown time')}, commit {str(origin.get('commit') or 'unknown')[:10]}"


def kept_name(session: Session) -> str:
    """Return the session's path below results/: by GPU, method, model, dtype and shape."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

    shape = f"{session.batch}x{session.context}"
    folder = plain(str(session.origin.get("gpu") or "cpu"))
    return f"{folder}/profile/{plain(session.method)}-{plain(session.model)}-{session.dtype}-{shape}.json"


def _compare(words: list[str], as_json: bool, md: Path | None) -> None:
    from dataclasses import asdict

    from warpline.profile.compare import compare
    from warpline.profile.render import console, markdown

    if len(words) != 2:
        raise ConfigError("two sessions are compared: warpline profile compare A.json B.json")
    found = compare(read(Path(words[0])), read(Path(words[1])))
    if md is not None:
        write(md, markdown.comparison(found))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found]))
        return
    console.show_comparison(found)
