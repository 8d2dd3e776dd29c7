"""`warpline tune`: sweeps the kernels' tunables on this GPU, projects them for another, or shows a recorded sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpline.cli.common import chosen, chosen_kernels
from warpline.config import DTYPE_BYTES
from warpline.errors import ConfigError
from warpline.hardware import ARCH_LIMITS, KNOWN_GPUS, Device, known_gpu
from warpline.tables import say, show

if TYPE_CHECKING:
    from warpline.tune.candidates import Case

#: The GPU to compile for where none is present and none is named.
USUAL_GPU = "NVIDIA H200"


def tune(
    names: Annotated[list[str] | None, typer.Argument(help="Kernels by name; all if none is given.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16, bf16, separated by commas.")] = "fp16,fp32",
    minutes: Annotated[
        float, typer.Option(min=0, help="Minutes; cases that there is no time for are left out and listed.")
    ] = 8.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what an earlier sweep measured.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Project for a GPU that is not here, as t4: the compiler's report and a model.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Show a recorded sweep, as results/nvidia-h200; measures nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON object.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a heat map of the gains as PNG.")] = None,
    save: Annotated[Path | None, typer.Option(help="Append the rows below this results folder.")] = None,
) -> None:
    """Find the best tunables of every kernel on this GPU. Each candidate is checked before it is timed; the best are
    stored and used from then on. An interrupted sweep continues where it stopped."""
    specs = chosen_kernels(names)
    dtypes = chosen(dtype, list(DTYPE_BYTES), "dtype")
    if picture is not None and not picture.parent.is_dir():
        raise ConfigError(f"cannot write {picture}: there is no folder {picture.parent}")
    target = _gpu(gpu) if gpu is not None else None

    from warpline.tune import report
    from warpline.tune.candidates import cases

    if recorded is not None:
        wanted = {spec.name for spec in specs}
        rows = [row for row in report.read(recorded) if row["kernel"] in wanted and row["dtype"] in dtypes]
        if not rows:
            raise ConfigError(f"{recorded} has no rows of these kernels and dtypes")
        _show(rows, as_json, picture)
        return

    from warpline.kernels.compile import nvrtc_version

    nvrtc_version()  # without it every candidate would fail, one by one

    import torch

    if target is None and not torch.cuda.is_available():
        arch = (_gpu(USUAL_GPU)).arch or ""
        _list(cases(specs, dtypes, arch), minutes, as_json)
        return

    from warpline.bench.rows import append, provenance
    from warpline.kernels import choices

    origin = provenance()
    stopped = False
    if target is not None:
        from warpline.progress import progress
        from warpline.tune.model import project

        found = cases(specs, dtypes, target.arch or "")
        with progress("Projecting", len(found)) as advance:
            results = project(found, target, advance)
        origin |= {"gpu": target.name, "driver": None}
    else:
        results, stopped = _sweep(specs, dtypes, minutes, fresh)
    rows = report.rows(results, origin)
    if not rows:
        raise ConfigError("nothing was measured: give it more --minutes" if not stopped else "nothing was measured yet")
    made = report.choices(rows)
    if target is None and made:
        typer.echo(f"{len(made)} choices kept in {choices.remember(origin['gpu'], made)}", err=True)
    if save is not None and not stopped:
        append(save, "tune", rows)
    _show(rows, as_json, picture)
    if stopped:
        raise KeyboardInterrupt


def _gpu(name: str) -> Device:
    found = known_gpu(name)
    if found is None or found.arch not in ARCH_LIMITS:
        names = ", ".join(device.name for device in KNOWN_GPUS if device.arch in ARCH_LIMITS)
        raise ConfigError(f"unknown GPU '{name}'; choose from: {names}")
    return found


def _sweep(specs: list[Any], dtypes: list[str], minutes: float, fresh: bool) -> tuple[list[Any], bool]:
    """Return the results so far, and whether the sweep was interrupted."""
    import torch

    from warpline.kernels.launch import arch_of
    from warpline.progress import progress
    from warpline.tune.candidates import cases
    from warpline.tune.journal import Journal
    from warpline.tune.sweep import ROUNDS, Sweep
    from warpline.tune.worker import Worker

    device, stopped = torch.cuda.current_device(), False
    name = torch.cuda.get_device_name(device)
    sweep = Sweep(cases(specs, dtypes, arch_of(device)), Worker(), Journal(name, fresh=fresh), minutes)
    with progress("Tuning", ROUNDS * len(sweep.results)) as advance:
        try:
            sweep.run(advance)
        except KeyboardInterrupt:
            stopped = True
    return sweep.results, stopped


def _show(rows: list[dict[str, Any]], as_json: bool, picture: Path | None) -> None:
    from warpline.tune import report

    if picture is not None:
        from warpline.bench.charts import png

        data = png(report.heat_map, rows)
        try:
            picture.write_bytes(data)
        except OSError as error:
            raise ConfigError(f"cannot write {picture}: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps({"rows": rows}))
        return
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        its = [row for row in rows if row["gpu"] == gpu]
        typer.echo(gpu)
        show(report.TITLES, [report.line(row) for row in its], least=report.LEAST, prose="best")
        for line in report.failures(its):
            say(f"failed: {line}")
        say(report.summary(its))


def _list(found: list[Case], minutes: float, as_json: bool) -> None:
    """Print the candidates of a sweep, compiled, and those that the compiler's report rules out."""
    from warpline.progress import progress
    from warpline.tune import report
    from warpline.tune.sweep import listed

    with progress("Compiling", len(found)) as advance:
        lists = listed(found, minutes, advance)
    needs = "timing them needs a CUDA GPU: run this where there is one, or see --gpu and --from"
    if as_json:
        typer.echo(json.dumps({"arch": found[0].arch if found else None, "cases": lists, "note": needs}))
        return
    show(("kernel", "dtype", "shape", "launches", "default", "candidates", "pruned", "left out", "why pruned"), [
        (
            row["kernel"],
            row["dtype"],
            "×".join(map(str, row["dims"].values())),
            report.launches(row),
            " ".join(map(str, row["default"].values())),
            str(len(row["candidates"])),
            str(sum(row["pruned"].values())),
            str(row["left_out"]),
            "; ".join(f"{count} {why}" for why, count in row["pruned"].items()),
        )
        for row in lists
    ], least=("left out", "default"), prose="why pruned")  # fmt: skip
    total = sum(len(row["candidates"]) for row in lists)
    say(f"{total:,} candidates of {len(lists)} cases compiled for {found[0].arch if found else 'n/a'}; {needs}")
