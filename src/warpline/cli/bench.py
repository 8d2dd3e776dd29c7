"""`warpline bench`: generation methods compared in one run; `warpline bench compare A B`: two runs compared."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from warpline.bench.methods.names import INT8, METHODS
from warpline.bench.workloads import WORKLOADS, Case, Settings, cases
from warpline.cli.common import NEW_TOKENS, PROMPT_TOKENS, Device, chosen, listed, our_name
from warpline.config import WEIGHT_BYTES, EngineConfig
from warpline.errors import ConfigError, one_of
from warpline.tables import say, show

#: The defaults are defined in the dataclass only.
_USUAL = Settings(device="auto")
_HELP = "Separated by commas, several make a sweep."
#: What the last line of output reports for the fastest method of each case.
_SUMMED = ("method", "seconds", "tokens_per_second", "requests_per_second", "us_per_token", "percent_of_limit")


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]… | compare A B",
            help=f"Of {', '.join(WORKLOADS)}; reference if none is given. Or two results to compare.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"All unless given. {_HELP}")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="random:gpt2 on a GPU, stories on a CPU; can be repeated for a sweep."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"fp16 on a GPU, fp32 on a CPU; int8 is {' and '.join(INT8)}. {_HELP}")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help=f"Sequences, or requests, instead of the workload's. {_HELP}")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(PROMPT_TOKENS, "--prompt", help=f"Tokens of the prompt. {_HELP}")
    ] = None,
    new: Annotated[str | None, typer.Option(NEW_TOKENS, "--new", help=f"Tokens to generate. {_HELP}")] = None,
    window: Annotated[str | None, typer.Option(help=f"Sliding windows. {_HELP}")] = None,
    device: Device = _USUAL.device,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Rounds in which the methods take turns.")
    ] = _USUAL.repetitions,
    budget: Annotated[float, typer.Option(min=0, help="Seconds per case beyond three rounds.")] = _USUAL.budget_seconds,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds per generation; longer ones are skipped.")
    ] = _USUAL.patience_seconds,
    minutes: Annotated[
        float, typer.Option(min=0, help="Minutes for the whole run; cases that have not begun by then are left out.")
    ] = _USUAL.limit_seconds / 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object alone.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with tables and charts.")] = None,
    charts: Annotated[Path | None, typer.Option(help="Write the charts as PNG into this folder.")] = None,
    save: Annotated[Path | None, typer.Option(help="Append the rows below this results folder.")] = None,
) -> None:
    """Measure ways to generate text side by side. All have the same weights. If output is piped, its last line is a
    JSON object."""
    if words and words[0] == "compare":
        if csv or md or html or charts or save:
            raise ConfigError("compare prints a table, or an object with --json; it writes no files")
        _compare(words[1:], as_json)
        return
    methods = chosen(method, METHODS, "method")
    EngineConfig(device=device)
    for name in words or ():
        one_of(name, WORKLOADS, "workload")
    dtypes = chosen(",".join(map(our_name, listed(dtype))), WEIGHT_BYTES, "dtype")
    if (charts or html) and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--html and --charts draw with matplotlib: pip install 'warpline[plot]'")
    _check_outputs([path for path in (csv, md, html) if path], [path for path in (charts, save) if path])

    import torch

    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    on_gpu = target.startswith("cuda")
    if "int8" in dtypes:
        methods, dtypes = _int8(methods, dtypes, "fp16" if on_gpu else "fp32")
    methods = methods or list(METHODS)
    wanted = cases(
        words or ["reference"],
        models=model or ["random:gpt2" if on_gpu else "stories"],
        dtypes=dtypes or ["fp16" if on_gpu else "fp32"],
        batches=_numbers("batch", batch),
        prompts=_numbers("prompt", prompt),
        new=_numbers("new", new),
        windows=_numbers("window", window) or (None,),
        on_cpu=not on_gpu,
    )
    settings = Settings(target, repetitions, budget, patience, 60 * minutes)
    rows, interrupted = _run(wanted, methods, settings, save, quiet=as_json)
    if not rows:
        raise KeyboardInterrupt
    if all(row["status"] in ("impossible", "missing") for row in rows):
        raise ConfigError(f"nothing could be measured: {rows[0]['why']}")
    _write(rows, csv=csv, md=md, html=html, charts=charts)
    if as_json or not sys.stdout.isatty():
        typer.echo(json.dumps({"rows": rows} if as_json else _summary(rows)))
    if interrupted:
        raise KeyboardInterrupt


def _check_outputs(files: list[Path], folders: list[Path]) -> None:
    """Raise an error now, not after all measurements, if results cannot be written there."""
    for path in files:
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a folder")
    for path in folders:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write into {path}: {error.strerror or error}") from error


def _int8(methods: list[str], dtypes: list[str], usual: str) -> tuple[list[str], list[str]]:
    """Add or select the methods with int8 weights; their rows stand beside those of `usual`, which they approximate."""
    others = [name for name in dtypes if name != "int8"]
    if others not in ([], [usual]):
        raise ConfigError(f"int8 is compared with {usual} alone here: use --dtype int8 or --dtype {usual},int8")
    if methods and not set(methods) & set(INT8):
        raise ConfigError(f"none of these methods has int8 weights: add {' or '.join(INT8)}")
    return methods or (list(INT8) if not others else []), [usual]


def _run(
    wanted: list[Case], methods: list[str], settings: Settings, save: Path | None, *, quiet: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows, saved case by case, and whether the run was interrupted: then only finished cases have rows."""
    from warpline.bench.report import card
    from warpline.bench.rows import append
    from warpline.bench.run import Bench
    from warpline.model.weights import read_config
    from warpline.progress import progress

    bench = Bench(settings)
    with progress("Measuring memory"):
        bench.prepare()
    rows: list[dict[str, Any]] = []
    if not quiet:
        first = {(case.model, case.dtype): case for case in reversed(wanted)}
        for case in reversed(first.values()):
            _print_card(card(read_config(case.model), case, bench.limits(case)["read_gb_s"]))
    with progress("Measuring", len(wanted) * len(methods)) as bar:
        bench.says = bar.says
        try:
            for found in bench.run(wanted, methods, bar):
                rows += found
                if save is not None:
                    append(save, "bench", found)
                if not quiet:
                    with bar.hidden():
                        _print_case(found)
        except KeyboardInterrupt:
            return rows, True
    return rows, False


def _write(
    rows: list[dict[str, Any]],
    *,
    csv: Path | None,
    md: Path | None,
    html: Path | None,
    charts: Path | None,
) -> None:
    from warpline.bench import report

    if csv is not None:
        _write_text(csv, report.as_csv(rows))
    if md is not None:
        _write_text(md, report.markdown(rows) + "\n")
    if charts is not None or html is not None:
        from warpline.bench import charts as drawing

        pictures = drawing.charts(rows)
        if charts is not None:
            drawing.save(pictures, charts)
        if html is not None:
            from warpline.bench.page import page

            _write_text(html, page(rows, pictures))


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest method of each case, and the machine's device and bandwidth."""
    from warpline.bench.report import as_case, grouped

    best = []
    for group in grouped(rows).values():
        timed = [row for row in group if row["status"] == "ok" and "seconds" in row]
        if timed:
            row = min(timed, key=lambda row: row["seconds"])
            best.append({"case": as_case(row).label, **{name: row[name] for name in _SUMMED if name in row}})
    return {"device": rows[0]["device"], "read_gb_s": rows[0]["read_gb_s"], "rows": len(rows), "best": best}


def _compare(words: list[str], as_json: bool) -> None:
    from dataclasses import asdict

    from warpline.bench.compare import compare, read

    if len(words) != 2:
        raise ConfigError("two results are compared: warpline bench compare A.jsonl B.jsonl")
    found = compare(read(Path(words[0])), read(Path(words[1])))
    if as_json:
        rows = [{**asdict(one), "ratio": one.ratio, "verdict": one.verdict} for one in found]
        typer.echo(json.dumps({"differences": rows}))
        return
    show(("case", "method", "before s", "after s", "ratio", "±", "verdict"), [
        (
            one.case,
            one.method,
            f"{one.before:.4f}",
            f"{one.after:.4f}",
            f"{one.ratio:.3f}",
            f"{one.uncertainty:.3f}",
            one.verdict,
        )
        for one in found
    ])  # fmt: skip


def _print_card(lines: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    typer.echo("\n".join(f"{name:<{width}}  {text}" for name, text in lines) + "\n")


def _print_case(rows: list[dict[str, Any]]) -> None:
    from warpline.bench.report import LEAST, absent, as_case, columns, notes

    typer.echo(as_case(rows[0]).label)
    titles, *lines = columns(rows)
    if lines:
        show(titles, lines, least=LEAST)
    say("".join(f"{note}\n" for note in notes(rows)) + "".join(f"not measured: {name}\n" for name in absent(rows)))


def _numbers(name: str, text: str | None) -> list[int]:
    parts = listed(text)
    if not all(part.isdecimal() for part in parts):
        name = {"new": "new-tokens", "prompt": "prompt-tokens"}.get(name, name)
        raise ConfigError(f"--{name} takes whole numbers, separated by commas, not '{text}'")
    return [int(part) for part in parts]
