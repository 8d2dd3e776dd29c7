"""One HTML page with the tables and charts of a run; it loads nothing from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from warpline.bench.report import Row, absent, as_case, columns, grouped, notes

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
div { overflow-x: auto; }
th { white-space: nowrap; } td { white-space: nowrap; }
td:first-child { white-space: normal; position: sticky; left: 0; background: Canvas; }
th.sorts { cursor: pointer; } p.soft { color: #64748b; margin: .2rem 0; }
img { max-width: 100%; background: #fff; border-radius: 6px; margin: .5rem 0; }
"""
SCRIPT = """
for (const head of document.querySelectorAll("th")) {
  head.className = "sorts";
  head.addEventListener("click", () => {
    const rows = [...head.closest("table").rows].slice(1), column = head.cellIndex, up = head.dataset.up !== "1";
    const value = (row) => parseFloat(row.cells[column].textContent.replace(/,/g, ""));
    head.dataset.up = up ? "1" : "0";
    rows.sort((a, b) => (up ? 1 : -1) * ((isNaN(value(a)) - isNaN(value(b))) || value(a) - value(b) || 0));
    rows[0].parentNode.append(...rows);
  });
}
"""


def page(rows: Sequence[Row], pictures: dict[str, bytes]) -> str:
    """Return the page for these rows; `pictures` are PNG bytes by name."""
    first = rows[0]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'><title>warpline bench</title>",
        f"<style>{STYLE}</style></head><body><h1>warpline bench</h1>",
        f"<p>{html.escape(_machine(first))}, {first['read_gb_s']:,.0f} GB/s read, torch {first['torch']}, "
        f"{html.escape(str(first['time']))}, commit {str(first['commit'])[:10]}</p>",
        "<p class='soft'>Medians; ± is half of the way from the 20th to the 80th percentile. A click on a title sorts. "
        "No GB/s where it is unknown how many bytes a method moves.</p>",
    ]
    for group in grouped(rows).values():
        parts.append(f"<h2>{html.escape(as_case(group[0]).label)}</h2>{_table(group)}")
    parts += [
        f"<img alt='{html.escape(name)}' src='data:image/png;base64,{base64.b64encode(data).decode()}'>"
        for name, data in pictures.items()
    ]
    return "\n".join([*parts, f"<script>{SCRIPT}</script></body></html>\n"])


def _machine(row: Row) -> str:
    threads = f", {row.get('cores') or row['threads']} cores, {row['threads']} threads" if "threads" in row else ""
    return f"{row['device']}{threads}"


def _table(rows: Sequence[Row]) -> str:
    titles, *lines = columns(rows)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    marks = "".join(f"<p>{html.escape(note)}</p>" for note in notes(rows))
    left_out = f"<p>Not measured: {html.escape('; '.join(absent(rows)))}.</p>" if absent(rows) else ""
    times = {row["repetitions"] for row in rows if "repetitions" in row}
    span = " to ".join(map(str, sorted({min(times, default=0), max(times, default=0)})))
    rounds = f"<p class='soft'>Repetitions: {span}.</p>" if times else ""
    return (f"<div><table><tr>{head}</tr>{body}</table></div>{rounds}" if lines else "") + marks + left_out
