"""`warpline profile`: where a method's time goes; `warpline profile compare A B`: two sessions side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from warpline.bench.methods.names import METHODS
from warpline.config import DTYPE_BYTES, EngineConfig
from warpline.errors import ConfigError, one_of
from warpline.profile.session import PHASES, Session, read, save, write

_BOTH = "both"


def profile(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD | SESSION.json | compare A B]",
            help=f"Of {', '.join(METHODS)}; torch if none is given. Or a session to show, or two to compare.",
        ),
    ] = None,
    phase: Annotated[str, typer.Option(help="prefill, decode or both.")] = _BOTH,
    model: Annotated[str | None, typer.Option("--model", "-m", help="random:gpt2 on a GPU, stories on a CPU.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp16 on a GPU, fp32 on a CPU.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
    steps: Annotated[int, typer.Option(help="Decode steps to record.")] = 8,
    layers: Annotated[bool, typer.Option("--layers", help="Each layer apart instead of all merged.")] = False,
    kernels: Annotated[int, typer.Option(min=1, help="Kernels that the table has at most.")] = 20,
    gpu: Annotated[str | None, typer.Option(help="Project the same work onto another card: t4, a100, h100 …")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the session, or the comparison, as JSON.")] = False,
    session: Annotated[Path | None, typer.Option(help="Write the session to this file (.json or .json.gz).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page, nothing fetched from elsewhere.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing (.json.gz).")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--save", help="Keep the session below this results folder, under its own name.")
    ] = None,
) -> None:
    """Which module, which kernel, which kind of operation takes the time, bound by what, and what to do about it."""
    words = words or []
    for path in filter(None, (session, html, md, trace)):  # said now, not when everything has been recorded
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if gpu is not None:
        from warpline.profile.roofline import other_roofs

        other_roofs(gpu, dtype or "fp32")
    if words[:1] == ["compare"]:
        _compare(words[1:], as_json, md)
        return
    if len(words) > 1:
        raise ConfigError(f"one method or session at a time, not {len(words)}: warpline profile {words[0]}")
    phases = PHASES if one_of(phase, (*PHASES, _BOTH), "phase") == _BOTH else (phase,)
    if words and _is_file(words[0]):
        found = read(Path(words[0]))
        found = _only(found, phases) if phase != _BOTH else found
    else:
        name = one_of(words[0] if words else "torch", METHODS, "method")
        found = _record(name, model, dtype, device, batch=batch, context=context, steps=steps, phases=phases)
    _write(found, session=session, html=html, md=md, trace=trace, keep=keep, gpu=gpu)
    if as_json:
        from warpline.profile.session import dumps

        typer.echo(dumps(found))
        return
    from warpline.profile.render import console

    console.show(found, merge=not layers, gpu=gpu, most=kernels)


def _is_file(word: str) -> bool:
    return word not in METHODS and (word.endswith((".json", ".gz")) or Path(word).exists())


def _only(session: Session, phases: tuple[str, ...]) -> Session:
    from dataclasses import replace

    return replace(session, phases=tuple(session.phase(name) for name in phases))


def _record(name: str, model: str | None, dtype: str | None, device: str, **shape: Any) -> Session:
    EngineConfig(device=device)
    if dtype is not None:
        one_of(dtype, DTYPE_BYTES, "dtype")

    import torch

    from warpline.profile.collect import Wish, collect
    from warpline.progress import progress

    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    on_gpu = target.startswith("cuda")
    wish = Wish(
        method=name,
        model=model or ("random:gpt2" if on_gpu else "stories"),
        dtype=dtype or ("fp16" if on_gpu else "fp32"),
        device=target,
        **shape,
    )
    with progress("Profiling", 2 + len(wish.phases)) as advance:
        return collect(wish, advance)


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
        save(found, keep / kept_name(found))
    if md is not None:
        from warpline.profile.render import markdown

        write(md, markdown.whole(found, gpu=gpu))
    if html is not None:
        from warpline.profile.render.html import page

        write(html, page(found, gpu=gpu))
    if trace is not None:
        from warpline.profile.render.chrome import trace as as_trace

        write(trace, as_trace(found))


def kept_name(session: Session) -> str:
    """Where a session lies below results/: by GPU, method, model, dtype and shape."""

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
