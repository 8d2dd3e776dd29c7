"""Results of a sweep: rows, the table of gains, a heat map, and the choices that follow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpline.errors import ConfigError
from warpline.kernels.choices import MEASURED, PROJECTED, Choice
from warpline.tune.sweep import NOISE, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
TITLES = (
    *("kernel", "dtype", "shape", "launches", "default", "µs", "best", "µs", "gain"),
    *("tried", "failed", "pruned", "left out"),
)
#: Columns that a narrow table can leave out, the least important first.
LEAST = ("pruned", "tried", "left out", "failed", "default", "µs", "launches")


def rows(results: Sequence[Result], origin: Row) -> list[Row]:
    """Return one row per case, with its provenance and the time of every measured candidate."""
    return [origin | _row(result) for result in results if result.attempts or result.why or result.left_out]


def _row(result: Result) -> Row:
    case, best = result.case, result.best
    verdict = "confirmed" if result.basis == MEASURED else "kept"  # a model confirms nothing
    if result.improved:
        verdict = "improved"
    if best is None:
        verdict = "failed" if result.why else "left out"
    row = {
        "kernel": case.spec.name,
        "arch": case.arch,
        "dtype": case.dtype,
        "dims": dict(case.dims),
        "shape": case.shape,
        "digest": case.digest,
        "basis": result.basis,
        "overlapping": case.overlapping,
        "default": case.tunables(case.default),
        "default_us": best.default_us if best is not None else None,
        "best": case.tunables(best.values) if best is not None else None,
        "best_us": best.us if best is not None else None,
        "verdict": verdict,
        "why": result.why,
        "tried": result.timed,
        "failed": [[*values, why] for values, why in result.faults.items()],
        "pruned": dict(Counter(result.pruned.values())),
        "left_out": len(result.left_out - result.attempts.keys()),
    }
    if result.basis == MEASURED:
        row["times"] = [[*one.values, one.us, one.default_us] for one in result.attempts.values() if one.us is not None]
    return row


def read(path: Path) -> list[Row]:
    """Return the newest row of each case in a file, or in all files below a folder."""
    files = sorted(path.rglob("tune.jsonl")) if path.is_dir() else [path]
    file = path
    try:
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]
        if not lines:
            raise FileNotFoundError
        return newest([json.loads(line) for line in lines])
    except FileNotFoundError:
        raise ConfigError(
            f"there is no sweep in {path}: name a tune.jsonl that 'warpline tune --save' has written, or its folder"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not what 'warpline tune --save' writes: {error}") from error


def newest(found: Sequence[Row]) -> list[Row]:
    """Return the last row of each GPU, kernel, dtype, shape class and way to launch."""
    return list({(*_key(row), row.get("overlapping", False)): row for row in found}.values())


def _key(row: Row) -> tuple[str, ...]:
    return row["gpu"], row["kernel"], row["dtype"], row["shape"]


def gain(row: Row) -> float | None:
    """Return the share of the default's time that the best saves; None without a time."""
    return 1 - row["best_us"] / row["default_us"] if row["best_us"] is not None else None


def line(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    saved = gain(row)
    mark = "~" if row["basis"] == PROJECTED else ""
    us = ("n/a", "n/a") if saved is None else (f"{mark}{row['default_us']:,.2f}", f"{mark}{row['best_us']:,.2f}")
    return (
        row["kernel"],
        row["dtype"],
        "×".join(map(str, row["dims"].values())),
        launches(row),
        " ".join(map(str, row["default"].values())),
        us[0],
        changes(row),
        us[1],
        f"{mark}{100 * (saved or 0):.0f} %" if row["verdict"] == "improved" else row["verdict"],
        str(row["tried"]),
        str(len(row["failed"])),
        str(sum(row["pruned"].values())),
        str(row["left_out"]),
    )


def launches(row: Row) -> str:
    """Return how a case is launched."""
    return "overlapping" if row.get("overlapping") else "alone"


def changes(row: Row) -> str:
    """Return the tunables in which the best differs from the default."""
    if row["best"] is None:
        return row["why"] or "there was no time"
    best = row["best"]
    changed = [f"{name} {value}→{best[name]}" for name, value in row["default"].items() if best[name] != value]
    return ", ".join(changed) or "default"


def summary(found: Sequence[Row]) -> str:
    """Return the sweep's results in one sentence."""
    verdicts = Counter(row["verdict"] for row in found)
    gains = sorted(gain(row) or 0.0 for row in found if row["verdict"] == "improved")
    text = f"{len(found)} cases: {verdicts['improved']} improved"
    if gains:
        text += f" (by {100 * gains[0]:.0f} to {100 * gains[-1]:.0f} %, median {100 * gains[len(gains) // 2]:.0f} %)"
    others = ("confirmed", "kept", "failed", "left out")
    text += "".join(f", {verdicts[name]} {name}" for name in others if verdicts[name])
    left, failed = sum(row["left_out"] for row in found), sum(len(row["failed"]) for row in found)
    if failed:
        text += f"; {failed} candidates failed and were skipped"
    if left:
        text += f"; {left} candidates were left out because time ran out"
    if any(row["basis"] == PROJECTED for row in found):
        text += "; projected from the compiler's report and the roofline, not measured"
    return text + "."


def failures(found: Sequence[Row]) -> list[str]:
    """Return every candidate that failed, and why."""
    lines = []
    for row in found:
        for *values, why in row["failed"]:
            tunables = " ".join(f"{name}={value}" for name, value in zip(row["default"], values, strict=True))
            lines.append(f"{row['kernel']} {row['dtype']} {tunables}: {why}")
    return lines


def choices(found: Sequence[Row]) -> list[Choice]:
    """Return the choice for each shape class, from its newest rows with the newest code."""
    classes: dict[tuple[str, ...], list[Row]] = {}
    for row in newest(found):
        if row["best"] is not None:
            classes.setdefault(_key(row), []).append(row)
    made = []
    for rows in classes.values():
        last = max(rows, key=lambda row: str(row.get("time", "")))
        rows = [row for row in rows if row["digest"] == last["digest"]]
        tunables = _steady(rows) if len(rows) > 1 else last["best"] if last["verdict"] == "improved" else None
        made.append(Choice(last["kernel"], last["dtype"], last["shape"], last["digest"], tunables, last["basis"]))
    return made


def _steady(rows: Sequence[Row]) -> dict[str, int] | None:
    """Return the candidate that saves most over all ways to launch, unless that is noise. It must have been timed in
    each way and never be slower than the default: a chain of one kernel is not the engine's chain of different ones.
    Candidates good in both ways were found to be good there; those good in only one may lose."""
    ways = [{tuple(values): us / usual for *values, us, usual in row["times"]} for row in rows]
    common = [values for values in ways[0] if all(way.get(values, 2.0) <= 1 for way in ways)]
    best = min(common, key=lambda values: sum(way[values] for way in ways))
    if sum(way[best] for way in ways) > (1 - NOISE[MEASURED]) * len(ways):
        return None
    return dict(zip(rows[0]["default"], best, strict=True))


def varying(found: Sequence[Row]) -> set[str]:
    """Return the dimensions in which rows of a kernel differ; all if there is one row."""
    names = set(found[0]["dims"])
    return {name for name in names if len({row["dims"][name] for row in found}) > 1} or names


def heat_map(found: Sequence[Row]) -> Figure:
    """Draw a line per kernel and dtype, with a square per shape: the share of the default's time that is saved."""
    from warpline.bench.charts import canvas

    lines: dict[str, list[Row]] = {}
    for row in found:
        way = " overlapping" if row.get("overlapping") else ""
        lines.setdefault(f"{row['kernel']} {row['dtype']}{way}", []).append(row)
    width = max(map(len, lines.values()))
    blank = [float("nan")] * width
    shares = [([100 * (gain(row) or 0.0) for row in group] + blank)[:width] for group in lines.values()]
    figure = canvas(2.6 + 1.15 * width, 1.2 + 0.34 * len(lines))
    axes = figure.subplots()
    most = max(10.0, *(share for group in shares for share in group if share == share))
    image = axes.imshow(shares, cmap="YlOrBr", vmin=0, vmax=most, aspect="auto")
    for y, group in enumerate(lines.values()):
        for x, row in enumerate(group):
            text = "×".join(str(extent) for name, extent in row["dims"].items() if name in varying(group))
            marks = {"improved": f"{shares[y][x]:.0f} %", "confirmed": "·", "kept": "·"}
            saved = marks.get(row["verdict"], row["verdict"])
            colour = "white" if shares[y][x] > 0.6 * most else "black"
            axes.text(x, y, f"{saved}\n{text}", ha="center", va="center", fontsize=5, color=colour)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=7)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, shrink=0.5, label="time saved (%)")
    basis = " (projected)" if found[0]["basis"] == PROJECTED else ""
    axes.set_title(f"Sweep of the tunables against their defaults{basis}; · is a default confirmed\n{found[0]['gpu']}",
                   fontsize=9)  # fmt: skip
    return figure
