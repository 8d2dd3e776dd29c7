"""The parts of docs/scale.md that are made from results/: what one replica gives, what splitting a model would cost,
how many GPUs a load takes, and the simulator compared with the server."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmarks import machines
from warpline.bench import charts
from warpline.bench.charts import PLAIN, PROUD, canvas
from warpline.config import FAMILY
from warpline.model import cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PICTURE = "scale-simulator.png"
GPU, MODEL = "nvidia-h200", "random:gpt2"
#: Assumed microseconds of one all-reduce between two GPUs.
ALL_REDUCE = 5.0
#: Share of a replica's maximum that is planned with: above it the first token waits (see the simulator).
PLANNED = 0.7

#: Labels of tools/scale.py's rows.
TTFT_LABELS = ("straight", "Ray, HAProxy")

Row = dict[str, Any]


def scale_rows() -> list[Row]:
    path = ROOT / "results" / "cpu" / "scale.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _bench(**wanted: Any) -> Row:
    rows = [row for row in machines()[GPU] if row["status"] == "ok" and all(row[k] == v for k, v in wanted.items())]
    if not rows:
        raise SystemExit(f"results/{GPU} has no row with {wanted}")
    return rows[-1]


def _throughput() -> Row:
    return _bench(workload="throughput", model=MODEL, method="warpline", dtype="fp16")


def replica() -> str:
    """Return the table of what one replica gives."""
    rows = []
    for batch in (1, 8, 64, 256):
        workload = "reference" if batch == 1 else "batch"
        row = _bench(workload=workload, model=MODEL, method="warpline", dtype="fp16", batch=batch, prompt=16, new=100)
        rows.append([str(batch), f"{row['tokens_per_second']:,.0f}", f"{row['us_per_token']:,.0f}"])
    many = _throughput()
    shown = table(["sequences at once", "tokens/s", "µs a step"], rows)
    mix = f"{many['requests_per_second']:,.0f} requests/s of about {many['prompt']} + {many['new']} tokens"
    return (
        f"GPT-2 124M (random weights, fp16) on one {many['device']}, `LLM.generate`, 16 + 100 tokens:\n\n{shown}\n\n"
        f"A mix of lengths, {many['batch']:,} requests: **{mix}**, {many['tokens_per_second']:,.0f} tokens/s."
    )


def tensor() -> str:
    """Return the table of a step on one GPU, and on two that split the model."""
    rows = []
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        row = _bench(workload="reference", model=f"random:{name}", method="persistent", dtype="fp16")
        config = FAMILY[name][1]
        exchanges = 2 * config.n_layer
        step, waiting = row["us_per_token"], exchanges * ALL_REDUCE
        moved = cost.decode_bytes(config, "fp16", lengths=[row["prompt"]], steps=1) / 1e6
        split = step / 2 + waiting
        rows.append([
            name, f"{moved:,.0f} MB", f"{step:,.0f}", str(exchanges), f"{waiting:,.0f}", f"{split:,.0f}",
            f"{step / split:.2f}×", f"{step / 2 / exchanges:.1f} µs",
        ])  # fmt: skip
    titles = ["model", "bytes a step", "µs a step, measured", "all-reduces", "µs of them",
              "µs a step if all else halves", "tokens/s, split over two", "it pays if one takes less than"]  # fmt: skip
    return table(titles, rows)


def plan() -> str:
    """Return the table of GPUs for some loads."""
    row = _throughput()
    each = PLANNED * row["requests_per_second"]
    rows = []
    for users, active, pause in (
        (1_000, 1.0, 30), (10_000, 0.2, 30), (100_000, 0.1, 30), (1_000_000, 0.1, 30), (1_000_000, 1.0, 30),
    ):  # fmt: skip
        rate = users * active / pause
        gpus = max(1, math.ceil(rate / each))
        rows.append([
            f"{users:,}", f"{100 * active:.0f} %", f"{rate:,.0f}", f"{rate * row['new']:,.0f}", f"{gpus:,}",
        ])  # fmt: skip
    titles = ["users", "of them active", "requests/s", "tokens/s", "GPUs"]
    note = (
        f"An active user asks every 30 s, for about {row['prompt']} + {row['new']} tokens; a GPU ({row['device']}, "
        f"gpt2 in fp16) is planned with {100 * PLANNED:.0f} % of its {row['requests_per_second']:,.0f} requests/s."
    )
    return note + "\n\n" + table(titles, rows)


def _loads() -> list[Row]:
    """Return the newest run of the comparison: from the last row that has the server's maximum."""
    rows = [row for row in scale_rows() if row["kind"] == "load"]
    starts = [i for i, row in enumerate(rows) if row["share"] is None]
    return rows[starts[-1] :] if starts else []


def simulator() -> str:
    """Return the simulator's figures beside the server's, for the same requests."""
    loads = _loads()
    if not loads:
        return "Not measured yet: `python -m tools.scale load --save results`."
    lines = []
    for row in loads:
        name = "all at once" if row["share"] is None else f"{100 * row['share']:.0f} % ({row['request_rate']:g}/s)"
        cells = [name]
        for ours, theirs in (
            ("simulated_output_throughput", "output_throughput"),
            ("simulated_p50_ttft_ms", "p50_ttft_ms"),
            ("simulated_p99_ttft_ms", "p99_ttft_ms"),
            ("simulated_p50_tpot_ms", "p50_tpot_ms"),
        ):
            cells.append(f"{row[theirs]:,.1f} / {row[ours]:,.1f} ({100 * (row[ours] / row[theirs] - 1):+.0f} %)")
        lines.append(cells)
    first = loads[0]
    shape = f"{first['input_len']} + {first['output_len']} tokens with a spread of {first['spread']:g}"
    titles = ["load", "tokens/s", "first token p50, ms", "p99, ms", "a token p50, ms"]
    return (
        f"![Measured and simulated](images/{PICTURE})\n\n`{first['model']}` on one thread of an {first['device']}, "
        f"requests of {shape}; measured / simulated:\n\n" + table(titles, lines)
    )


def replicas() -> str:
    """Return what replicas give, and what Ray costs."""
    rows, lines = scale_rows(), []
    names = {"replicas": "online, HTTP, as many requests at once as there are slots", "offline": "`warpline batch`"}
    for kind, name in names.items():
        some = [r for r in rows if r["kind"] == kind]
        one, two = ([r["output_throughput"] for r in some if r["replicas"] == count] for count in (1, 2))
        if one and two:  # the newest run: earlier ones were shorter
            lines.append([name, f"{one[-1]:,.0f}", f"{two[-1]:,.0f}", f"{two[-1] / one[-1]:.2f}×"])
    text = table(["", "1 replica, tokens/s", "2 replicas", ""], lines) if lines else "Not measured yet."
    straight, through = ([r for r in rows if r.get("label") == label and "median_way_ms" in r] for label in TTFT_LABELS)
    if straight and through:
        a, b = straight[-1], through[-1]
        ways, tails = [f"{one['median_way_ms']:.2f}" for one in (a, b)], [f"{one['p99_way_ms']:.1f}" for one in (a, b)]
        text += (
            f"\n\nA request for one token, alone: {a['median_ttft_ms']:.1f} ms straight, {b['median_ttft_ms']:.1f} ms "
            "through Ray and HAProxy. Without what the engine takes, which differs between processes, the way there "
            f"and back is {' and '.join(ways)} ms (p99 {' and '.join(tails)}): "
            f"**Ray adds {b['median_way_ms'] - a['median_way_ms']:.2f} ms**."
        )
    return text


def chart(rows: Sequence[Row]) -> Figure:
    """Draw throughput and the first token's time over the load, measured and simulated."""
    some = [row for row in rows if row["share"] is not None]
    figure = canvas(9, 3.8)
    left, right = figure.subplots(1, 2)
    xs = [100 * row["share"] for row in some]
    lines = [
        (left, "output_throughput", "o", ""),
        (right, "p50_ttft_ms", "o", "p50 "),
        (right, "p99_ttft_ms", "s", "p99 "),
    ]
    for axes, name, marker, label in lines:
        axes.plot(xs, [row[name] for row in some], color=PROUD, marker=marker, label=f"{label}measured")
        simulated = [row[f"simulated_{name}"] for row in some]
        axes.plot(xs, simulated, color=PLAIN, marker="x", ls="--", label=f"{label}simulated")
    for axes, title in ((left, "output tokens per second"), (right, "ms to the first token")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("load, % of the most")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    left.set_ylim(bottom=0)
    right.set_yscale("log")  # near the maximum a request waits for a slot, not for a launch
    for axes in (left, right):
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return figure


def draw() -> None:
    if _loads() and is_stale():
        (IMAGES / PICTURE).write_bytes(charts.png(chart, _loads()))


def is_stale() -> bool:
    from PIL import Image

    if not (IMAGES / PICTURE).exists():
        return True
    with Image.open(IMAGES / PICTURE) as image:
        return bool(image.info.get("Source") != charts.digest(_loads()))
