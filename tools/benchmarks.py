"""The parts of documents that are made from results/*/bench.jsonl: tables, pictures, and where we lose."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warpline.bench import charts, methods, report
from warpline.bench.figures import decode_rates
from warpline.bench.methods.names import BASELINE, HEADLINE
from warpline.bench.workloads import WORKLOADS, Case
from warpline.model.weights import read_config

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
#: The workload that is drawn as bars; contexts are drawn wherever there are several.
DRAWN = "reference"
#: The machine, model and dtype that the README shows. Runs there must have the public call, or, if none has it, the
#: baseline that the others are compared with.
SHOWN = ("nvidia-h200", "random:gpt2", "fp16")


def recorded() -> dict[str, list[report.Row]]:
    """Return all rows of every machine, by its folder, GPUs before the CPU."""
    paths = sorted((ROOT / "results").glob("*/bench.jsonl"), reverse=True)
    return {path.parent.name: [derived(json.loads(line)) for line in path.read_text().splitlines()] for path in paths}


def derived(row: report.Row) -> report.Row:
    """Return a row with its rates computed in the present way, whenever it was measured."""
    if "gb_s" in row and "read_gb_s" in row:
        kind = methods.find(row["method"])
        shape = {name: row[name] for name in ("workload", "kind", "model", "batch", "prompt", "new", "window")}
        case = Case(**shape, dtype=kind.stored or row["dtype"])
        config = case.windowed(read_config(case.model))
        row |= decode_rates(case, config, row["us_per_token"], row["read_gb_s"])
    return row


def machines() -> dict[str, list[report.Row]]:
    """Return the newest rows of every machine, by its name in file names; tables with outdated methods are left out."""
    order = list(WORKLOADS)

    def place(row: report.Row) -> tuple[object, ...]:
        return row["model"], row["dtype"], order.index(row["workload"]), row["batch"], row["prompt"], row["new"]

    found: dict[str, list[report.Row]] = {}
    for folder, rows in recorded().items():
        by_machine: dict[tuple[Any, ...], list[report.Row]] = {}
        for row in rows:
            by_machine.setdefault(report.machine(row), []).append(row)
        for its in by_machine.values():
            name = _named(folder, its[0])
            shown = [row for row in its if (name, row["model"], row["dtype"], row["workload"]) == (*SHOWN, DRAWN)]
            others = [row for row in its if row not in shown]
            having = HEADLINE if any((row["method"], row["status"]) == (HEADLINE, "ok") for row in shown) else BASELINE
            newest = [*report.newest(shown, having), *report.newest(others)]
            fresh = [row for group in report.grouped(newest).values() if report.speaks_for_us(group) for row in group]
            if fresh:
                found[name] = sorted(fresh, key=place)
    return found


def _named(folder: str, row: report.Row) -> str:
    """Return the machine's name: GPUs have a folder each, CPUs share one."""
    if row["gpu"]:
        return folder
    return re.sub(r"[^a-z0-9]+", "-", f"{row['device']} {row['threads']} threads".lower()).strip("-")


def drawn() -> dict[str, tuple[charts.Drawing, list[report.Row]]]:
    """Return the pictures that the documents show, by file name, and the rows of each."""
    found = {}
    for machine, rows in machines().items():
        for name, picture in charts.pictures(rows).items():
            if name.startswith((DRAWN, "context")):
                found[f"bench-{machine}-{name}.png"] = picture
    return found


def draw() -> None:
    """Write missing and stale pictures, and remove those that are no longer shown."""
    wanted = drawn()
    for path in IMAGES.glob("bench-*.png"):
        if path.name not in wanted:
            path.unlink()
    for name, (figure, rows) in wanted.items():
        if is_stale(name, rows):
            (IMAGES / name).write_bytes(charts.png(figure, rows))


def is_stale(name: str, rows: Sequence[report.Row]) -> bool:
    """Whether a picture is not of these rows, by the digest in its metadata."""
    from PIL import Image

    if not (IMAGES / name).exists():
        return True
    with Image.open(IMAGES / name) as image:
        return bool(image.info.get("Source") != charts.digest(rows))


def tables() -> str:
    """Return everything that was measured, machine by machine."""
    parts = []
    for machine, rows in machines().items():
        first = rows[0]
        parts.append(f"## {named(first)}")
        days = sorted({row["time"][:10] for row in rows})
        read = sorted({row["read_gb_s"] for row in rows})
        span = f"{read[0]:,.0f}" if len(read) == 1 else f"{read[0]:,.0f} to {read[-1]:,.0f}"
        parts.append(f"torch {first['torch']}, memory read at {span} GB/s in these runs, {' and '.join(days)}.")
        parts += [f"![{name}](images/{name})" for name in drawn() if name.startswith(f"bench-{machine}-")]
        parts.append(report.markdown(rows))
    return "\n\n".join(parts)


def workloads() -> str:
    """Return the table of workloads."""
    lines = [f"| `{workload.name}` | {workload.summary} |" for workload in WORKLOADS.values()]
    return "\n".join(["| workload | what it is |", "| --- | --- |", *lines])


def named(row: report.Row) -> str:
    """Return the name of a machine; for a CPU with its cores and the threads used."""
    if "threads" not in row:
        return str(row["device"])
    return f"{row['device']}, {row.get('cores') or row['threads']} cores, {row['threads']} threads"


def where_we_lose() -> str:
    """Return a list of the cases in which a peer is ahead."""
    lines = [f"- {named(rows[0])}: {line}." for rows in machines().values() for line in report.losses(rows)]
    return "\n".join(lines) or "Nowhere, in the rows there are."
