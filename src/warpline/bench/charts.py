"""Pictures of rows: tokens per second as bars, and time per token against context. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpline.bench.methods.names import OURS
from warpline.bench.report import Row, as_case, grouped
from warpline.bench.workloads import Case
from warpline.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = Callable[[Sequence[Row]], "Figure"]

#: Rows of which only noise is known have no rate (figures.py).
RATE = "tokens_per_second"

PROUD, PLAIN = "#c2410c", "#64748b"


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("charts need matplotlib: pip install 'warpline[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def bars(rows: Sequence[Row]) -> Figure:
    """Draw tokens per second of every method of one case, with a dashed line where memory bandwidth limits it."""
    timed = sorted((r for r in rows if r["status"] == "ok" and RATE in r), key=lambda r: r[RATE])
    figure = canvas(8, 1.2 + 0.42 * len(timed))
    axes = figure.subplots()
    values = [row[RATE] for row in timed]
    names = [row["title"] for row in timed]
    drawn = axes.barh(names, values, color=[PROUD if row["method"] in OURS else PLAIN for row in timed])
    axes.bar_label(drawn, labels=[f" {value:,.0f}" for value in values])
    axes.margins(x=0.12)
    limits = {y: limit for y, row in enumerate(timed) if (limit := allowed(row)) is not None}
    for y, limit in limits.items():
        axes.vlines(limit, y - 0.4, y + 0.4, colors="black", linestyles="dashed", linewidth=1.2)
    axes.set_xlabel("tokens per second" + (" (dashed: what memory allows)" if limits else ""))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"{titled(as_case(rows[0]))}\n{rows[0]['device']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def allowed(row: Row) -> float | None:
    """Return tokens per second of all sequences together if every step ran at memory bandwidth; None if unknown."""
    if "gb_s" not in row or not row["percent_of_limit"]:
        return None
    return float(row["batch"] * 1e6 / row["us_per_token"] * 100 / row["percent_of_limit"])


def titled(case: Case) -> str:
    """Describe the case as the title of a picture."""
    model, random = case.model.removeprefix("random:"), case.model.startswith("random:")
    many = "1 sequence" if case.batch == 1 else f"{case.batch:,} sequences"
    shape = f"prompt of {case.prompt:,}" + ("" if case.kind == "prefill" else f" and {case.new:,} new tokens")
    return f"{model}{' (random weights)' if random else ''} in {case.dtype}, {many}, {shape}"


def against_context(rows: Sequence[Row]) -> Figure:
    """Draw time per token against the length of the context, one line per method."""
    figure = canvas(8, 4.5)
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [(row["prompt"] + row["new"] / 2, row["us_per_token"]) for row in rows if row["method"] == method]
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", label=method, linewidth=2.5 if method in OURS else 1.3)
    times = [row["us_per_token"] for row in rows]
    if max(times) > 4 * min(times):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("{x:,.0f}")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("µs per token")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    first = rows[0]
    axes.set_title(f"{first['model']} {first['dtype']}, batch {first['batch']}\n{first['device']}", fontsize=10)
    return figure


def pictures(rows: Sequence[Row]) -> dict[str, tuple[Drawing, list[Row]]]:
    """Return every picture the rows allow, by name, with the rows it is drawn from: bars for each timed case, and lines
    where decoding was timed at several contexts."""
    found: dict[str, tuple[Drawing, list[Row]]] = {}
    for group in grouped(rows).values():
        if any(row["status"] == "ok" and RATE in row for row in group):
            first = group[0]
            shape = f"{first['batch']}x{first['prompt']}+{first['new']}"
            found[_slug(f"{first['workload']} {first['model']} {first['dtype']} {shape}")] = bars, group
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["kind"] == "decode" and "us_per_token" in row:
            lines.setdefault((row["model"], row["dtype"], row["batch"]), []).append(row)
    for (model, dtype, batch), group in lines.items():
        if len({row["prompt"] for row in group}) > 1:
            found[_slug(f"context {model} {dtype} {batch}")] = against_context, group
    return found


def png(draw: Drawing, rows: Sequence[Row]) -> bytes:
    """Return the picture as PNG bytes. Its metadata holds a digest of its rows, which shows whether it is stale."""
    buffer = io.BytesIO()
    draw(rows).savefig(buffer, format="png", dpi=130, metadata={"Source": digest(rows), "Software": None})
    return buffer.getvalue()


def digest(rows: Sequence[Row]) -> str:
    """Return a short digest of these rows."""
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()[:16]


def charts(rows: Sequence[Row]) -> dict[str, bytes]:
    """Draw every picture the rows allow; return PNG bytes by name."""
    return {name: png(draw, group) for name, (draw, group) in pictures(rows).items()}


def _slug(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name)


def save(pictures: dict[str, bytes], folder: Path) -> list[Path]:
    """Write the pictures as PNG files below `folder`; return their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in pictures.items():
            (folder / f"{name}.png").write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error
    return [folder / f"{name}.png" for name in pictures]
