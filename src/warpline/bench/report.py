"""Turns rows into tables: a card of limits, the table of methods, Markdown and CSV. Needs no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from warpline.bench.methods.names import BASELINE, CALLED, CHOSEN, INT8, INT8_KV, NAIVE, OURS
from warpline.bench.workloads import Case
from warpline.config import ModelConfig
from warpline.model import cost

Row = dict[str, Any]
#: The fields that two rows must share to be compared.
CASE = tuple(field.name for field in fields(Case))
#: Fields of a row that describe the run and the machine.
_OF_A_RUN = ("time", "commit", "device", "gpu", "cores", "threads", "torch", "read_gb_s", "cache_mb")


def key(row: Row) -> tuple[Any, ...]:
    """Return the fields that identify the row's case."""
    return tuple(row[name] for name in CASE)


def machine(row: Row) -> tuple[Any, ...]:
    """Return the machine of a row: rows of different machines are never in one table."""
    threads = row.get("threads")  # absent in rows of a GPU
    return row.get("device"), threads and (row.get("cores") or threads), threads


def as_case(row: Row) -> Case:
    """Return the case of a row."""
    return Case(**{name: row[name] for name in CASE})


def grouped(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by machine and case, all in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*machine(row), *key(row)), []).append(row)
    return groups


def newest(rows: Sequence[Row], having: str | None = None) -> list[Row]:
    """Return the rows of each case's newest run, or of the newest with a method `having` if there is one: times of
    different runs are not compared. Methods measured only in other runs are named without figures."""
    found = []
    for group in grouped(rows).values():
        wanted = [row["time"] for row in group if row["method"] == having]
        latest = max(wanted or [row["time"] for row in group])
        current = [row for row in group if row["time"] == latest]
        there = {row["method"] for row in current}
        elsewhere = dict.fromkeys(
            row["method"] for row in group if row["status"] == "ok" and row["method"] not in there
        )
        shared = {name: current[0][name] for name in (*CASE, *_OF_A_RUN) if name in current[0]}
        left_out = shared | {"status": "left out", "why": "only in other runs"}
        found += [*current, *(left_out | {"method": name} for name in elsewhere)]
    return found


def speaks_for_us(rows: Sequence[Row]) -> bool:
    """Whether a table has figures of what `auto` chooses today; older tables say nothing about it."""
    return any(row["method"] in CHOSEN and row["status"] == "ok" for row in rows)


def losses(rows: Sequence[Row]) -> list[str]:
    """Return a line for each workload, model and dtype of weights in which a peer is faster than the public call, or,
    where that was not measured, than the best of ours. Peers with int8 weights are compared with ours in int8."""
    behind: dict[tuple[str, str, str], list[tuple[float, str, str]]] = {}
    cases: dict[tuple[str, str, str], int] = {}
    for group in grouped(rows).values():
        timed = [row for row in group if row["status"] == "ok" and "seconds" in row and row["method"] not in INT8_KV]
        for stored in ("int8", group[0]["dtype"]):
            alike = [row for row in timed if (row["method"] in INT8) == (stored == "int8")]
            ours = [row for row in alike if row["method"] in OURS]
            others = [row for row in alike if row["method"] not in OURS]
            called = [row for row in ours if row["method"] in CALLED] or ours
            if not called or not others:
                continue
            name = (group[0]["workload"], group[0]["model"], stored)
            cases[name] = cases.get(name, 0) + 1
            best, own = (min(some, key=_taken) for some in (others, called))
            if _taken(best) < _taken(own):
                behind.setdefault(name, []).append((_taken(own) / _taken(best), best["method"], own["method"]))
    lines = []
    for (workload, model, dtype), found in behind.items():
        found.sort()
        span = f"{found[0][0]:.2f}" if len(found) == 1 else f"{found[0][0]:.2f} to {found[-1][0]:.2f}"
        peers = " or ".join(f"`{name}`" for name in sorted({peer for _, peer, _ in found}))
        mine = " or ".join(f"`{name}`" for name in sorted({name for _, _, name in found}))
        count = f"{len(found)} of {cases[workload, model, dtype]} cases"
        lines.append(f"{workload}, {model} {dtype}: {peers} is {span} times as fast as our {mine}, in {count}")
    return lines


def card(config: ModelConfig, case: Case, read_gb_s: float) -> list[tuple[str, str]]:
    """Return lines on what the machine could do at best: the bytes of a decode step over the bandwidth measured now."""
    context = case.prompt + case.new // 2
    moved = cost.total_bytes(cost.decode(config, case.dtype, batch=case.batch, context=context, screened=True))
    seconds = moved / read_gb_s / 1e9
    return [
        ("model", f"{case.model}, {case.dtype}: {cost.weight_bytes(config, case.dtype) / 1e6:,.1f} MB of weights"),
        ("KV cache", f"{cost.kv_bytes_per_position(config, case.dtype):,} bytes per position and sequence"),
        ("a step reads", f"{moved / 1e6:,.1f} MB at least, at batch {case.batch} and context {context}"),
        ("memory reads", f"{read_gb_s:,.0f} GB/s, measured in this run"),
        ("so at best", f"{1e6 * seconds:,.1f} µs per step, {case.batch / seconds:,.0f} tokens/s"),
    ]


#: Columns of the table.
TITLES = (
    "method", "median s", "±", "tok/s", "requests/s", "lanes", "idle", "× naive", "× peer", "µs/token", "GB/s",
    "% of limit", "first token ms",
)  # fmt: skip
#: Columns that a narrow table can leave out, the least important first.
LEAST = ("GB/s", "µs/token", "idle", "× naive", "first token ms", "±")


def cells(row: Row, naive: Row | None = None, peer: Row | None = None) -> tuple[str, ...]:
    """Return one line of the table, with the ratios to `naive` and `peer`; missing values are empty."""
    if "peak_bytes" in row:
        return (row["method"], f"{row['peak_bytes'] / 1e6:,.0f} MB at most", *[""] * (len(TITLES) - 2))
    if "cold_seconds" in row:
        text = f"cold {row['cold_seconds']:.2f} s, warm {row['warm_seconds']:.2f} s"
        text += "" if row.get("bytecode", True) else ", torch compiled by Python each time"
        return (row["method"], text, *[""] * (len(TITLES) - 2))
    spread = (row["seconds_p80"] - row["seconds_p20"]) / 2 / row["seconds"]
    unsure, beyond = "unsure" in row or _is_late(row), row.get("percent_of_limit", 0) > 100
    return (
        row["method"]
        + ("" if row["agreeing"] == 1 else f" ({100 * row['agreeing']:.1f} % same)")
        + (" †" if unsure else ""),
        f"{row['seconds']:.4f}",
        f"{100 * spread:.1f} %" if row["repetitions"] > 1 else "",
        _optional(row, "tokens_per_second", ",.2f"),
        _optional(row, "requests_per_second", ",.2f"),
        f"{row['padded_batch']} padded" if "padded_batch" in row else _optional(row, "mean_lanes", ",.1f"),
        f"{100 * row['idle_share']:.1f} %" if "idle_share" in row else "",
        *("" if one is None or one is row else f"{_taken(one) / _taken(row):.2f}×" for one in (naive, peer)),
        _optional(row, "us_per_token", ",.1f"),
        _optional(row, "gb_s", ",.1f"),
        _optional(row, "percent_of_limit", ".1f") + ("*" if beyond else ""),
        f"{1e3 * row['first_token_seconds']:,.2f}" if "first_token_seconds" in row and not _is_late(row) else "",
    )


def _is_late(row: Row) -> bool:
    """Whether noise put the first token, measured in other generations, after the last."""
    return bool(row.get("first_token_seconds", 0.0) >= row.get("seconds", 1.0)) and row["new"] > 1


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the explanations of the marks that the table uses."""
    timed = [row for row in rows if row["status"] == "ok" and "seconds" in row]
    found = []
    peer = yardsticks(rows)[1]
    if peer is not None and len(timed) > 1:
        found.append(f"× peer: against {peer['method']}, the fastest of the others with weights in this dtype.")
    if any(row.get("percent_of_limit", 0) > 100 for row in timed):
        caches = {row.get("cache_mb") for row in timed}
        held = ", ".join(f"{size:,.0f} MB" for size in sorted(filter(None, caches)))
        found.append(
            "* beyond what memory was measured to give: a part of the weights stays in a cache"
            + (f" ({held})" if held else "")
            + ", or the machine was busier when the limit was measured."
        )
    if any("unsure" in row or _is_late(row) for row in timed):
        found.append("† the time from first to last token is less than the noise, and is left out.")
    return found


def _optional(row: Row, name: str, form: str) -> str:
    return format(row[name], form) if name in row else ""


def yardsticks(rows: Sequence[Row]) -> tuple[Row | None, Row | None]:
    """Return the rows that others are compared with: the naive model, and the fastest peer with the same kind of
    weights; each may be None."""
    measured = {row["method"]: row for row in rows if row["status"] == "ok" and "seconds" in row}
    peers = [row for name, row in measured.items() if name not in (*OURS, *INT8, *INT8_KV, *NAIVE)]
    return measured.get(BASELINE), min(peers, key=_taken, default=None)


def _taken(row: Row) -> float:
    """Return what methods are compared by: seconds of a whole generation, or of a token where the prompt's time is left
    out."""
    if row["workload"] != "decode":
        return float(row["seconds"])
    return float(1 / (row.get("tokens_per_second") or row["batch"] * row["new"] / row["seconds"]))


def markdown(rows: Sequence[Row]) -> str:
    """Return a Markdown table per case, with the methods left out."""
    parts = []
    for group in grouped(rows).values():
        parts.append(f"**{as_case(group[0]).label}** · {group[0]['time'][:10]}")
        titles, *lines = columns(group)
        if lines:
            drawn = [titles, ["---"] * len(titles), *lines]
            parts.append("\n".join("| " + " | ".join(line) + " |" for line in drawn))
        parts += [_escaped(note) for note in notes(group)]
        parts += ["Not measured: " + "; ".join(absent(group)) + "."] if absent(group) else []
    return "\n\n".join(parts)


def _escaped(note: str) -> str:
    """Escape a leading asterisk, which would begin a list."""
    return "\\" + note if note.startswith("*") else note


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the table lines of one case, without titles, for the rows that were measured."""
    naive, peer = yardsticks(rows)
    return [cells(row, naive, peer) for row in rows if row["status"] == "ok"]


def columns(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return titles and lines of one case, without the empty columns."""
    lines = table(rows)
    used = [i for i in range(len(TITLES)) if any(line[i] for line in lines)]
    return [tuple(line[i] for i in used) for line in (TITLES, *lines)]


def absent(rows: Sequence[Row]) -> list[str]:
    """Return the methods that were not measured and why; methods with the same reason share an entry."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            reasons.setdefault(f"{row['status']}: {row['why']}", []).append(row["method"])
    return [f"{', '.join(names)} ({why})" for why, names in reasons.items()]


def as_csv(rows: Sequence[Row]) -> str:
    """Return all rows as CSV, with every field that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
