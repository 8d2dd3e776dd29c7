"""`warpline kernels`: lists the catalog, compiles it for any GPU, and times it on this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from warpline.cli.common import chosen, chosen_kernels
from warpline.config import DTYPE_BYTES
from warpline.errors import one_of
from warpline.hardware import ARCH_LIMITS
from warpline.tables import show

app = typer.Typer(help="The CUDA kernels: list, compile, time.", no_args_is_help=False)

Names = Annotated[list[str] | None, typer.Argument(help="Kernels by name; all if none is given.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def kernels(context: typer.Context, as_json: AsJson = False) -> None:
    """List the catalog."""
    if context.invoked_subcommand is None:
        list_(as_json)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List what each kernel does; the default command."""
    rows: list[dict[str, Any]] = [
        {
            "name": spec.name,
            "summary": spec.summary,
            "dtypes": list(spec.dtypes),
            "tunables": {name: list(values) for name, values in spec.tunables.items()},
            "source": spec.header,
        }
        for spec in chosen_kernels(None)
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(("kernel", "what it does", "dtypes", "source"), [
        (row["name"], row["summary"], " ".join(row["dtypes"]), row["source"]) for row in rows
    ], least=("dtypes", "source"))  # fmt: skip


@app.command("compile")
def compile_(
    names: Names = None,
    arch: Annotated[str, typer.Option(help="One or several, separated by commas.")] = ",".join(ARCH_LIMITS),
    dtype: Annotated[str, typer.Option(help="fp32, fp16, bf16, separated by commas.")] = ",".join(DTYPE_BYTES),
    as_json: AsJson = False,
) -> None:
    """Compile for any GPU, on a machine without one: registers, shared memory, spills and time per kernel."""
    from warpline.kernels.compile import compile_many
    from warpline.kernels.spec import Variant

    archs = chosen(arch, list(ARCH_LIMITS), "arch")
    dtypes = chosen(dtype, list(DTYPE_BYTES), "dtype")
    jobs = {
        (Variant.of(spec, kind, dims, target), target): None
        for spec in chosen_kernels(names)
        for kind in dtypes
        for dims in spec.bench_dims
        for target in archs
        if spec.runs_on(kind, target)
    }
    rows: list[dict[str, Any]] = [
        {
            "kernel": binary.program.label,
            "arch": binary.arch,
            "registers": binary.report.registers,
            "shared_bytes": (binary.report.shared_bytes or 0) + binary.program.smallest_launch.shared_bytes,
            "spill_bytes": binary.report.spill_bytes,
            "seconds": binary.report.seconds,
            "cached": binary.report.cached,
        }
        for binary in compile_many(list(jobs))
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(("kernel", "arch", "registers", "shared B", "spilled B", "compiled in"), [
        (
            row["kernel"],
            row["arch"],
            str(row["registers"]),
            str(row["shared_bytes"]),
            str(row["spill_bytes"]),
            f"{1e3 * row['seconds']:,.0f} ms{' (kept)' if row['cached'] else ''}",
        )
        for row in rows
    ])  # fmt: skip


@app.command("bench")
def bench_(
    names: Names = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16, bf16, separated by commas.")] = "fp32,fp16",
    arch: Annotated[
        str | None, typer.Option(help="Compile for an older GPU: compute_75 runs the Turing path on a newer one.")
    ] = None,
    as_json: AsJson = False,
    save: Annotated[Path | None, typer.Option(help="Append the rows below this results folder.")] = None,
) -> None:
    """Time the kernels on this GPU, beside torch and beside the measured roof: a copy, or a large product."""
    specs, dtypes = chosen_kernels(names), chosen(dtype, list(DTYPE_BYTES), "dtype")
    if arch is not None:
        one_of(arch, [target.replace("sm_", "compute_") for target in ARCH_LIMITS], "arch")

    from warpline.bench.kernels import bench, require_gpu
    from warpline.bench.rows import append
    from warpline.progress import progress

    require_gpu()
    rows: list[dict[str, Any]] = []
    with progress("Timing kernels", sum(len(spec.bench_dims) for spec in specs) * len(dtypes)) as advance:
        for row in bench(specs, dtypes, arch):
            rows.append(row)
            advance(1)
    if save is not None:
        append(save, "kernels", rows)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show(("kernel", "dtype", "shape", "µs", "GB/s", "TFLOP/s", "bound", "% of roof", "torch µs", "speed-up"), [
        (
            row["kernel"],
            row["dtype"],
            "×".join(map(str, row["dims"].values())),
            f"{row['us']:,.2f}",
            f"{row['gb_s']:,.0f}",
            f"{row['tflop_s']:,.2f}",
            row["bound"],
            f"{row['percent_of_roof']:.0f}",
            f"{row['torch_us']:,.2f}",
            f"{row['torch_us'] / row['us']:.2f}×",
        )
        for row in rows
    ], least=("TFLOP/s", "GB/s", "bound"))  # fmt: skip
