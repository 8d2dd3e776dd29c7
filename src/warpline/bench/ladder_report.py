"""Rows of a climb become a table, a picture and a page. Needs no torch."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warpline.bench.page import STYLE
from warpline.bench.rows import SCHEMA
from warpline.errors import ConfigError
from warpline.kernels.ladder import LADDERS
from warpline.kernels.ladder.rung import NOWHERE

Row = dict[str, Any]
TITLES = ("rung", "dtype", "µs", "GB/s", "TFLOP/s", "% of roof", "gain", "why")
#: Relative difference between two runs of the same kernel.
_NOISE = 0.01


def read(path: Path) -> list[Row]:
    """Read rows from a ladder.jsonl, from all of them below a folder, or from the output of `--json`."""
    files = sorted(path.rglob("ladder.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(
            f"no climb is recorded below {path}: 'warpline ladder all --save {path}' records one on a GPU"
        )
    return [row for file in files for row in _read(file)]


def _read(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        found = [row for row in rows if row["ladder"] and row["rung"] and row["shape"] and row["time"]]
        schemas = {row["schema"] for row in rows}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no climb: give a file that 'warpline ladder --save' wrote") from error
    if not found:
        raise ConfigError(f"{path} is empty: give a file that 'warpline ladder --save' wrote")
    if max(schemas) > SCHEMA:
        raise ConfigError(f"{path} was written by a newer warpline (schema {max(schemas)}, known {SCHEMA}): update")
    return found


def newest(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the newest climb of each GPU, ladder and shape: times of different runs are not compared."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["gpu"], row["ladder"], row["shape"]), []).append(row)
    return [[row for row in group if row["time"] == max(r["time"] for r in group)] for group in groups.values()]


def title(rows: Sequence[Row]) -> str:
    """Return the ladder's title with the shape and the GPU."""
    first = rows[0]
    known = LADDERS.get(first["ladder"])
    return f"{known.title if known else first['ladder']} {first['shape'].replace('x', '×')}, {first['gpu']}"


def origin(row: Row) -> str:
    """Return where and when the row was measured, and the copy bandwidth there."""
    return f"{row['gpu']}, copy {row['copy_gb_s']:,.0f} GB/s, torch {row['torch']}, {row['time'][:10]}"


def why(row: Row) -> str:
    """Return the rung's explanation; empty for a rung that no longer exists."""
    known = LADDERS.get(row["ladder"])
    return next((rung.why for rung in known.rungs if rung.name == row["rung"]), "") if known else ""


def verdict(row: Row) -> str:
    """Return "gains", "same" or "loses" from the measured gain; empty where there is none."""
    gain = row.get("gain")
    if gain is None:
        return ""
    return "loses" if gain < 1 - _NOISE else "same" if gain <= 1 + _NOISE else "gains"


def columns(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the titles, then one line per rung and yardstick."""
    return [TITLES, *(_line(row, rows) for row in rows)]


def _line(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    name = {"variant": "{} (aside)", "yardstick": "[{}]"}.get(row["kind"], "{}").format(row["rung"])
    if row["status"] != "ok":
        return name, row["dtype"], "", "", "", "", "", NOWHERE
    mark = {"loses": " loses", "same": " same"}.get(verdict(row), "")
    return (
        name,
        row["dtype"],
        f"{row['us']:,.2f}",
        f"{row['gb_s']:,.0f}",
        f"{row['tflop_s']:,.2f}",
        f"{row['percent_of_roof']:.1f}",
        "" if row["gain"] is None else f"{row['gain']:.2f}×{mark}",
        _beside(row, rows) if row["kind"] == "yardstick" else why(row),
    )


def _beside(row: Row, rows: Sequence[Row]) -> str:
    """Compare a yardstick with our fastest rung of the same dtype, in a sentence."""
    ours = [r for r in rows if r["kind"] == "rung" and r["dtype"] == row["dtype"] and r["status"] == "ok"]
    if not ours:
        return ""
    best = min(ours, key=lambda r: r["us"])
    return f"'{best['rung']}' takes {best['us'] / row['us']:.2f} times as long."


def span(rows: Sequence[Row]) -> str:
    """Summarise the climb in one line: first rung, last rung, and which variants or rungs lose."""
    climbed = [row for row in rows if row["kind"] == "rung" and row["status"] == "ok"]
    if len(climbed) < 2:
        return "There is nothing to climb at this shape."
    first, last = climbed[0], climbed[-1]
    lost = [row["rung"] for row in rows if verdict(row) == "loses"]
    text = f"From '{first['rung']}' to '{last['rung']}': {first['us'] / last['us']:,.1f} times as fast."
    return text + (f" Losing here: {', '.join(lost)}." if lost else "")


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of one climb as Markdown."""
    titles, *lines = columns(rows)
    table = "\n".join("| " + " | ".join(line) + " |" for line in [titles, ("---",) * len(titles), *lines])
    return table.replace("__", r"\_\_")  # or Markdown would show names in bold


# --- the picture ------------------------------------------------------------------------------------------------------

_COLOURS = {"rung": "#c2410c", "variant": "#e9a178", "loses": "#94a3b8", "yardstick": "#64748b"}
_LEFT, _WIDTH, _STEP = 190, 560, 26
_SVG_STYLE = (
    "text { font: 13px system-ui, sans-serif; fill: #1f2937; } .title { font-weight: bold; } .grid { stroke: #8884; } "
    "@media (prefers-color-scheme: dark) { text { fill: #e5e7eb; } }"
)


def svg(rows: Sequence[Row]) -> str:
    """Draw the rate that limits the op as bars on a logarithmic scale, from the first rung to the yardsticks."""
    timed = [row for row in rows if row["status"] == "ok"]
    top = [row for row in timed if row["kind"] == "rung"][-1]
    figure, unit = ("tflop_s", "TFLOP/s") if top["bound"] == "compute" else ("gb_s", "GB/s")
    low = math.floor(math.log10(min(max(row[figure], 1e-6) for row in timed)))
    high = math.ceil(math.log10(max(row[figure] for row in timed)) + 1e-9)
    high = max(high, low + 1)
    height = 60 + _STEP * len(timed)

    def place(value: float) -> float:
        return _LEFT + _WIDTH * (math.log10(max(value, 1e-6)) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 150} {height}" role="img">',
        f"<style>{_SVG_STYLE}</style><title>{html.escape(title(rows))}</title>",
        f'<text class="title" x="8" y="18">{html.escape(title(rows))}: {unit}</text>',
    ]
    for power in range(low, high + 1):
        x = place(10.0**power)
        label = f"{10.0**power:,.0f}" if power >= 0 else f"{10.0**power:g}"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{height - 24}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{label}</text>')
    for i, row in enumerate(timed):
        y, end = 34 + i * _STEP, place(row[figure])
        kind = "loses" if verdict(row) == "loses" else row["kind"]
        label = f"{row[figure]:,.1f}" + ("" if row["gain"] is None else f"  ({row['gain']:.2f}×)")
        name = html.escape(f"{row['rung']} {row['dtype']}" + (" (aside)" if row["kind"] == "variant" else ""))
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{name}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{max(1.0, end - _LEFT):.1f}" height="18" fill="{_COLOURS[kind]}"/>',
            f'<text x="{max(end, _LEFT + 1) + 6:.1f}" y="{y + 14}">{label}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


_PAGE_STYLE = (
    "td:last-child, th:last-child { text-align: left; white-space: normal; min-width: 20rem; } svg { max-width: 100%; }"
)


def page(climbs: Sequence[Sequence[Row]]) -> str:
    """Return one HTML page with all tables and pictures; it loads nothing from elsewhere."""
    first = climbs[0][0]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'><title>warpline ladder</title>",
        f"<style>{STYLE} {_PAGE_STYLE}</style></head>",
        "<body><h1>warpline ladder</h1>",
        f"<p>{html.escape(origin(first))}, commit {html.escape(str(first['commit'])[:10])}</p>",
    ]
    for rows in climbs:
        titles, *lines = ([html.escape(text) for text in line] for line in columns(rows))
        head = "".join(f"<th>{text}</th>" for text in titles)
        body = "".join("<tr>" + "".join(f"<td>{text}</td>" for text in line) + "</tr>" for line in lines)
        parts.append(f"<h2>{html.escape(title(rows))}</h2><p>{html.escape(span(rows))}</p>")
        parts.append(f"{svg(rows)}<div><table><tr>{head}</tr>{body}</table></div>")
    return "\n".join([*parts, "</body></html>\n"])
