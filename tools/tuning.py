"""The uses of results/*/tune.jsonl: the table of gains, its picture, and the choices that the package ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools import benchmarks
from warpline.bench import charts
from warpline.kernels import choices
from warpline.kernels.catalog import CATALOG
from warpline.tune import report

ROOT = Path(__file__).parents[1]


def machines() -> dict[str, list[report.Row]]:
    """Return the newest rows of every GPU, by its folder, measured ones first."""
    order = list(CATALOG)
    found = {}
    for path in sorted((ROOT / "results").glob("*/tune.jsonl")):
        rows = [row for row in report.read(path) if row["kernel"] in CATALOG]
        rows.sort(key=lambda row: (order.index(row["kernel"]), row["dtype"], row.get("overlapping", False)))
        found[path.parent.name] = rows
    return dict(sorted(found.items(), key=lambda item: item[1][0]["basis"]))


def gains() -> str:
    """Return a table for each GPU; for a projection only rows that differ from the default."""
    parts = []
    for machine, rows in machines().items():
        projected = rows[0]["basis"] == choices.PROJECTED
        shown = [row for row in rows if row["verdict"] != "kept"]
        parts.append(f"### {rows[0]['gpu']}" + (", projected" if projected else ""))
        parts.append(report.summary(rows))
        if not projected:
            parts.append(f"![Time saved by the sweep]({_image(machine, 'images/')})")
        if shown:
            titles = [f"{title} (projected)" if projected and title == "µs" else title for title in report.TITLES]
            lines = [titles, ["---"] * len(titles), *map(report.line, shown)]
            parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts) or "No sweep has been recorded yet."


def _image(machine: str, folder: str = "") -> str:
    return f"{folder}tune-{machine}.png"


def drawn() -> dict[str, tuple[charts.Drawing, Sequence[report.Row]]]:
    """Return the heat maps that the documents show, by file name, and the rows of each."""
    found = machines().items()
    return {_image(m): (report.heat_map, rows) for m, rows in found if rows[0]["basis"] == choices.MEASURED}


def draw() -> None:
    """Write missing and stale pictures."""
    for name, (figure, rows) in drawn().items():
        if benchmarks.is_stale(name, rows):
            (benchmarks.IMAGES / name).write_bytes(charts.png(figure, rows))


def shipped() -> dict[Path, str]:
    """Return the files of choices inside the package. Choices for code that no longer exists are left out, so that a
    change to a kernel shows what is lost until it is swept again."""
    gpus = {rows[0]["gpu"]: rows for rows in machines().values()}
    made = {
        gpu: [one for one in report.choices(rows) if one.tunables is not None and not one.is_stale]
        for gpu, rows in gpus.items()
    }
    return {choices.shipped_file(gpu): choices.text(gpu, found) for gpu, found in made.items()}


def ship() -> None:
    """Write the files of choices."""
    for path, text in shipped().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
