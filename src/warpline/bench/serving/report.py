"""Turns rows of servers into a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from warpline.bench.charts import PLAIN, PROUD, canvas
from warpline.bench.serving.figures import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Columns that fit into 80 characters; times in ms.
TITLES = ("server", "load", "tok/s", "req/s", "TTFT", "p99", "TPOT", "p99", "E2E", "p99", "failed")
#: If the client uses more of a core than this, the client may have been the limit.
BUSY = 0.8


def cells(row: Row) -> tuple[str, ...]:
    """Return a line of the table."""

    def ms(name: str) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    spans = [ms(f"{which}_{name}_ms") for name in ("ttft", "tpot", "e2el") for which in ("median", "p99")]
    return (
        row["label"],
        load(row),
        f"{row['output_throughput']:,.0f}",
        f"{row['request_throughput']:,.1f}",
        *spans,
        str(row["failed"] or ""),
    )


def load(row: Row) -> str:
    """Describe the load of a row: how many requests at once, or how many per second."""
    parts = [] if row["request_rate"] is None else [f"{row['request_rate']:g}/s"]
    parts += [] if row["max_concurrency"] is None else [f"×{row['max_concurrency']}"]
    return " ".join(parts) or "all"


def notes(row: Row) -> list[str]:
    """Return the notes that the table of this row needs."""
    found = []
    if row["client_cpu_share"] > BUSY:
        found.append(f"{load(row)}: the client was busy {100 * row['client_cpu_share']:.0f} % of the time: it may be "
                     "what was measured")  # fmt: skip
    if (share := row.get("share_of_library")) is not None:
        library = f"{row['library_output_throughput']:,.0f} tok/s"
        found.append(f"{load(row)}: {100 * share:.1f} % of LLM in one process with the same requests ({library})")
    if (added := row.get("added_p50_ttft_ms")) is not None:
        found.append(
            f"{load(row)}: the first token {added:.2f} ms later than there (p99 {row['added_p99_ttft_ms']:.2f})"
        )
    if refused := row.get("refused"):
        found.append(f"{load(row)}: {refused:,} refused, within {row['p99_refusal_ms']:.1f} ms (p99)")
    if "chunks" in row["counted"]:
        found.append(f"{load(row)}: the server does not say how many tokens it sent: its chunks were counted")
    found += [f"{load(row)}: {count} × {why}" for why, count in row["errors"].items()]
    return found


def chart(rows: Sequence[Row]) -> Figure:
    """Draw tokens per second and time to the first token over the load, a line for each server."""
    figure = canvas(9, 4)
    left, right = figure.subplots(1, 2)
    places = {name: i for i, name in enumerate(dict.fromkeys(load(row) for row in rows))}
    labels = list(dict.fromkeys(row["label"] for row in rows))
    for i, label in enumerate(labels):
        some = [row for row in rows if row["label"] == label and row["completed"]]
        xs = [places[load(row)] for row in some]
        style = {"color": PROUD if i == 0 else PLAIN, "marker": "os^Dv"[i % 5], "label": label}
        left.plot(xs, [row["output_throughput"] for row in some], **style)
        right.plot(xs, [row["median_ttft_ms"] for row in some], **style)
        right.fill_between(
            xs,
            [row["median_ttft_ms"] for row in some],
            [row["p99_ttft_ms"] for row in some],
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
    for axes, title in ((left, "output tokens per second"), (right, "ms to the first token, p50 to p99")):
        axes.set_xticks(list(places.values()), list(places))
        axes.set_xlabel("load: requests at once (×) or per second (/s)")
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.yaxis.set_major_formatter("{x:,.0f}")
    if len(labels) > 1:
        left.legend(fontsize=8, frameon=False)
    first = rows[0]
    shape = f"{first['input_len']} + {first['output_len']} tokens"
    figure.suptitle(f"{first['model']}, {first['num_prompts']} requests of {shape}", fontsize=11)
    return figure
