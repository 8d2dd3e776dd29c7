"""One HTML page with the tables and charts of a run, nothing fetched from elsewhere."""

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
img { max-width: 100%; background: #fff; border-radius: 6px; margin: .5rem 0; }
"""


def page(rows: Sequence[Row], pictures: dict[str, bytes]) -> str:
    """The page."""
    first = rows[0]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'><title>warpline bench</title>",
        f"<style>{STYLE}</style></head><body><h1>warpline bench</h1>",
        f"<p>{html.escape(str(first['device']))}, {first['read_gb_s']:,.0f} GB/s read, torch {first['torch']}, "
        f"{html.escape(str(first['time']))}, commit {str(first['commit'])[:10]}</p>",
    ]
    for group in grouped(rows).values():
        parts.append(f"<h2>{html.escape(as_case(group[0]).label)}</h2>{_table(group)}")
    parts += [
        f"<img alt='{html.escape(name)}' src='data:image/png;base64,{base64.b64encode(data).decode()}'>"
        for name, data in pictures.items()
    ]
    return "\n".join([*parts, "</body></html>\n"])


def _table(rows: Sequence[Row]) -> str:
    titles, *lines = columns(rows)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    marks = "".join(f"<p>{html.escape(note)}</p>" for note in notes(rows))
    left_out = f"<p>Not measured: {html.escape('; '.join(absent(rows)))}.</p>" if absent(rows) else ""
    return (f"<div><table><tr>{head}</tr>{body}</table></div>" if lines else "") + marks + left_out
