"""The parts of documents that are made from results/*/ladder.jsonl: the table and the picture of every climb."""

from __future__ import annotations

from pathlib import Path

from warpline.bench import ladder_report as report
from warpline.kernels.ladder import LADDERS

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PAGE = "docs/kernels/{}.md"


def climbs() -> dict[str, list[report.Row]]:
    """Return the newest climb of every machine, ladder and shape, by the name of its picture."""
    found = {}
    for path in sorted((ROOT / "results").glob("*/ladder.jsonl")):
        for rows in report.newest(report.read(path)):
            found[f"ladder-{path.parent.name}-{rows[0]['ladder']}-{rows[0]['shape']}.svg"] = rows
    return found


def draw() -> None:
    """Write the pictures, and remove those that are no longer shown."""
    wanted = climbs()
    for path in IMAGES.glob("ladder-*.svg"):
        if path.name not in wanted:
            path.unlink()
    for name, rows in wanted.items():
        (IMAGES / name).write_text(report.svg(rows), encoding="utf-8")


def measured(ladder: str) -> str:
    """Return table and picture of a ladder, or how to get them."""
    parts = []
    for name, rows in climbs().items():
        if rows[0]["ladder"] == ladder:
            parts.append(f"### {report.title(rows)}")
            parts.append(f"{report.span(rows)} {report.origin(rows[0])}; {_peaks(rows)}.")
            parts += [f"![The climb](../images/{name})", report.markdown(rows)]
    how = f"`warpline ladder {ladder} --save results` on a GPU measures it, and `make readme` puts it here."
    return "\n\n".join(parts) or f"Not measured yet: {how}"


def _peaks(rows: list[report.Row]) -> str:
    peaks = sorted({(row["dtype"], row["peak_tflop_s"]) for row in rows if row["status"] == "ok"})
    return "large products " + ", ".join(f"{dtype} {peak:,.0f} TFLOP/s" for dtype, peak in peaks)


def overview() -> str:
    """Return a line for each ladder: its rungs, and the result at its usual shape."""
    lines = ["| ladder | rungs | asides | measured |", "| --- | --- | --- | --- |"]
    for ladder in LADDERS.values():
        usual = ladder.shape_of(ladder.dims)
        found = [rows for rows in climbs().values() if (rows[0]["ladder"], rows[0]["shape"]) == (ladder.name, usual)]
        rungs = ", ".join(rung.name for rung in ladder.climb)
        asides = ", ".join(rung.name for rung in ladder.rungs if rung.variant)
        text = " ".join(f"{rows[0]['gpu']}: {report.span(rows)}" for rows in found) or "not yet"
        lines.append(f"| [{ladder.title}](kernels/{ladder.name}.md) | {rungs} | {asides} | {text} |")
    return "\n".join(lines)
