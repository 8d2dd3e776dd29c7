"""`warpline ladder`: shows what each optimisation of a kernel gains, rung by rung."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from warpline.cli.common import chosen
from warpline.errors import ConfigError
from warpline.hardware import ARCH_LIMITS
from warpline.kernels.arguments import Dims
from warpline.kernels.ladder import LADDERS, find_ladder
from warpline.kernels.ladder.rung import NOWHERE, Ladder
from warpline.tables import say, show

#: The oldest GPUs that are supported, and a recent common one.
_USUAL_ARCHS = "sm_75,sm_90"


def ladder(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]… | all", help=f"Of {', '.join(LADDERS)}; listed if none is given."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape instead of the default: ROWSxOUTPUTSxINPUTS for matmul, and so on.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Compile for these GPUs and list registers and spills; separated by commas.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Show a recorded run: a ladder.jsonl, or a folder such as results.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one page with tables and pictures.")] = None,
    save: Annotated[Path | None, typer.Option(help="Append the rows below this results folder.")] = None,
) -> None:
    """Climb from a naive kernel to the best. Every rung is checked, then timed: what each idea gains over the rung
    below, and why."""
    ladders = [find_ladder(name) for name in (LADDERS if "all" in (names or ()) else names or ())]
    if shape is not None and len(ladders) != 1:
        raise ConfigError("--shape is the shape of one ladder: name it")
    if recorded is not None and (arch or save):
        raise ConfigError("--from shows what was recorded: it goes with --shape, --json and --html alone")
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"cannot write {html}: there is no folder {html.parent}")
    sized = [(one, one.dims if shape is None else one.sized(shape)) for one in ladders]
    if recorded is not None:
        _show(_replayed(recorded, sized, exactly=shape is not None), as_json, html)
    elif not ladders:
        if arch or html or save:
            raise ConfigError(f"name a ladder, or all: {', '.join(LADDERS)}")
        _list(as_json)
    elif arch is not None or not _has_gpu():
        if arch is None and (html or save):
            raise ConfigError("a page or rows need times, and those a CUDA GPU: --from shows a recorded run")
        _compile(sized, chosen(arch or _USUAL_ARCHS, ARCH_LIMITS, "arch"), as_json)
        if arch is None:
            typer.echo("note: timing needs a CUDA GPU; 'warpline ladder --from results' shows recorded times", err=True)
    else:
        _show(_measured(sized, save), as_json, html)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _list(as_json: bool) -> None:
    rows = [
        {
            "ladder": one.name,
            "rung": rung.name,
            "variant": rung.variant,
            "kernel": rung.spec.name,
            "dtype": rung.dtype,
            "source": rung.spec.header,
            "why": rung.why,
        }
        for one in LADDERS.values()
        for rung in one.rungs
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(("ladder", "rung", "dtype", "source", "why"), [
        (
            str(row["ladder"]),
            f"{row['rung']}{' (aside)' if row['variant'] else ''}",
            str(row["dtype"]),
            str(row["source"]),
            str(row["why"]),
        )
        for row in rows
    ], least=("source", "dtype"), prose="why")  # fmt: skip


def _compile(sized: Sequence[tuple[Ladder, Dims]], archs: list[str], as_json: bool) -> None:
    from warpline.kernels.compile import compile_many

    places = [(one, rung, dims, arch) for one, dims in sized for rung in one.rungs for arch in archs]
    jobs = [(rung.compiled_as(dims, arch), arch) for _, rung, dims, arch in places if rung.allows(dims, arch)]
    compiled = iter(compile_many(jobs))
    rows: list[dict[str, Any]] = []
    for one, rung, dims, arch in places:
        row = {"ladder": one.name, "rung": rung.name, "arch": arch}
        if not rung.allows(dims, arch):
            rows.append(row | dict.fromkeys(("registers", "shared_bytes", "spill_bytes")) | {"why": NOWHERE})
            continue
        binary = next(compiled)
        shared = (binary.report.shared_bytes or 0) + binary.program.smallest_launch.shared_bytes
        figures = {"registers": binary.report.registers, "shared_bytes": shared}
        rows.append(row | figures | {"spill_bytes": binary.report.spill_bytes, "why": rung.why})
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(("ladder", "rung", "arch", "registers", "shared B", "spilled B", "why"), [
        tuple("" if value is None else str(value) for value in row.values()) for row in rows
    ], prose="why")  # fmt: skip


def _measured(sized: Sequence[tuple[Ladder, Dims]], save: Path | None) -> list[list[dict[str, Any]]]:
    """Return the rows, ladder by ladder, each ladder saved when it is finished."""
    from warpline.bench.ladder import climb, steps
    from warpline.bench.rows import append
    from warpline.progress import progress

    found: list[list[dict[str, Any]]] = []
    with progress("Climbing", sum(steps(one) for one, _ in sized)) as advance:
        rows = climb(sized)
        for one, _ in sized:
            found.append([])
            for _, row in zip(range(steps(one)), rows, strict=False):
                found[-1].append(row)
                advance(1)
            if save is not None:
                append(save, "ladder", found[-1])
    return found


def _replayed(path: Path, sized: Sequence[tuple[Ladder, Dims]], *, exactly: bool) -> list[list[dict[str, Any]]]:
    """Return the newest recorded climbs of the given ladders, or of all; with `exactly` only those at their shapes."""
    from warpline.bench.ladder_report import newest, read

    climbs = newest(read(path))
    if sized:
        wanted = {one.name: one.shape_of(dims) for one, dims in sized}
        climbs = [rows for rows in climbs if rows[0]["ladder"] in wanted]
        if exactly:
            climbs = [rows for rows in climbs if rows[0]["shape"] in wanted.values()]
        if not climbs:
            places = ", ".join(f"{name} at {text}" if exactly else name for name, text in wanted.items())
            raise ConfigError(f"{path} has no climb of {places}")
    return climbs


def _show(climbs: list[list[dict[str, Any]]], as_json: bool, html: Path | None) -> None:
    from warpline.bench import ladder_report as report

    if html is not None:
        try:
            html.write_text(report.page(climbs), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {html}: {error.strerror or error}") from error
    if as_json:
        rows = [row | {"verdict": report.verdict(row), "why": report.why(row)} for climb in climbs for row in climb]
        typer.echo(json.dumps(rows, indent=1))
        return
    for climb in climbs:
        titles, *lines = report.columns(climb)
        typer.echo(report.title(climb))
        show(titles, lines, least=("TFLOP/s", "GB/s", "dtype"), prose="why")
        say(report.span(climb) + "\n")
