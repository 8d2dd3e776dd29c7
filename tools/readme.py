"""Regenerates the parts of documents that are made from the catalog, from results/ and from the embedded model, and the
sweeps' choices in the package: `make readme`.

Text between <!-- begin NAME --> and <!-- end NAME --> is replaced; the rest of a page is written by hand.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import benchmarks, claims, drawings, ladders, profiles, reference, scaling, tuning
from warpline import LLM, SamplingParams
from warpline.bench.kernels import rates
from warpline.bench.rows import stamp
from warpline.kernels.catalog import CATALOG
from warpline.kernels.ladder import LADDERS

ROOT = Path(__file__).parents[1]


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def catalog() -> str:
    rows = [
        [f"`{spec.name}`", spec.summary, ", ".join(spec.dtypes), f"`{spec.header}`", ", ".join(spec.tunables)]
        for spec in CATALOG.values()
    ]
    return table(["kernel", "what it does", "dtypes", "device code", "tunables"], rows)


def newest_kernel_rows() -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """Return the newest row of each kernel, dtype, shape and target, in the catalog's order."""
    newest: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for path in sorted((ROOT / "results").glob("*/kernels.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            # Rows from before the roof was measured are history, and so are those of removed kernels, or of kernels
            # that were rewritten with other tunables.
            spec = CATALOG.get(row["kernel"])
            if spec is None or "percent_of_roof" not in row:
                continue
            if row.get("tunables", spec.tunables).keys() != spec.tunables.keys():
                continue
            if row["dims"].keys() not in [dims.keys() for dims in spec.bench_dims]:
                continue  # the op's dimensions have other names now
            now = rates(spec, row["dtype"], row["dims"], row["us"], row["copy_gb_s"], row["peak_tflop_s"])
            if abs(now["gb_s"] / max(row["gb_s"], 0.1) - 1) > 0.02 and row["gb_s"] > 5:
                continue  # it read or wrote other data than the present op
            row |= now
            shape = "×".join(str(extent) for extent in row["dims"].values())
            newest[row["kernel"], row["dtype"], shape, row["arch"]] = row
    order = {name: i for i, name in enumerate(CATALOG)}
    return dict(sorted(newest.items(), key=lambda item: order[item[0][0]]))


def kernel_losses() -> str:
    """Return each kernel and dtype that torch beats at some shape: at how many of its shapes, and by how much."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for (kernel, dtype, _, arch), row in newest_kernel_rows().items():
        if arch.startswith("sm_"):
            ratios.setdefault((kernel, dtype), []).append(row["us"] / row["torch_us"])
    lines = []
    for (kernel, dtype), found in ratios.items():
        lost = sorted(ratio for ratio in found if ratio > 1)
        if lost:
            span = f"{lost[0]:.2f}" if len(lost) == 1 else f"{lost[0]:.2f} to {lost[-1]:.2f}"
            lines.append(f"- `{kernel}` {dtype}: at {len(lost)} of {len(found)} shapes, {span} times torch's time")
    return "\n".join(lines)


def kernel_rows() -> str:
    newest = newest_kernel_rows()
    rows = [
        [
            f"`{kernel}`",
            f"{dtype} ({arch})" if arch.startswith("compute") else dtype,
            shape,
            f"{row['us']:,.2f}",
            f"{row['gb_s']:,.0f}",
            f"{row['tflop_s']:,.1f}",
            f"{row['percent_of_roof']:.0f} % {row['bound']}",
            f"{row['torch_us']:,.2f} {row['torch_by'] if row['torch_by'] != 'torch' else ''}".strip(),
            f"{row['torch_us'] / row['us']:.2f}×",
        ]
        for (kernel, dtype, shape, arch), row in newest.items()
    ]
    origins = sorted({(row["gpu"], row["torch"], row["copy_gb_s"], row["time"][:10]) for row in newest.values()})
    peaks = sorted({(row["dtype"], row["peak_tflop_s"]) for row in newest.values() if row["arch"].startswith("sm_")})
    notes = [f"{gpu}, torch {torch}, copy {copy:,.0f} GB/s, {day}." for gpu, torch, copy, day in origins]
    notes += ["Large products: " + ", ".join(f"{dtype} {peak:,.0f} TFLOP/s" for dtype, peak in peaks) + "."]
    titles = ["kernel", "dtype", "shape", "µs", "GB/s", "TFLOP/s", "of the roof", "torch µs", "speed-up"]
    return " ".join(notes) + "\n\n" + table(titles, rows)


@functools.cache
def story(prompt: str, seed: int) -> str:
    """Return what `warpline generate PROMPT --seed SEED` prints on a CPU, folded to the width of a page."""
    (completion,) = _llm().generate(prompt, SamplingParams(seed=seed))
    return "\n".join(textwrap.fill(line, 116) for line in (prompt + completion.text).splitlines())


@functools.cache
def _llm() -> LLM:
    return LLM(device="cpu", dtype="fp32")


def demo() -> str:
    """Run the command of `make demo` and return its output."""
    found = re.search(r'generate "(.+)" --seed (\d+)', (ROOT / "Makefile").read_text())
    if found is None:
        raise SystemExit("the Makefile's demo is not where it was")
    return f"```console\n$ make demo\n{story(found[1], int(found[2]))}\n$ make test\n```"


SAMPLES = (
    "Once upon a time",
    "The old whale",
    "Zoe wanted to learn how to paint.",
    "One windy night, a tiny mouse",
    '"Who took my cookie?" asked the knight.',
)


def samples() -> str:
    parts = [f"`--seed {seed}`\n\n```text\n{story(prompt, seed)}\n```" for seed, prompt in enumerate(SAMPLES, 1)]
    return "\n\n".join(parts)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"calls": claims.calls},
    "docs/cpu.md": {"cpu": claims.cpu},
    "docs/serving.md": {"servers": claims.served},
    "docs/tutorial.md": {"demo": demo},
    "docs/benchmarks.md": {
        "bench workloads": benchmarks.workloads,
        "bench losses": benchmarks.where_we_lose,
        "bench t4": claims.t4,
        "bench tables": benchmarks.tables,
    },
    "docs/kernels.md": {
        "catalog": catalog,
        "ladders": ladders.overview,
        "kernel rows": kernel_rows,
        "kernel losses": kernel_losses,
    },
    **{ladders.PAGE.format(name): {"climb": functools.partial(ladders.measured, name)} for name in LADDERS},
    "docs/stories.md": {"samples": samples},
    "docs/log.md": {"contents": reference.contents},
    "docs/reference/commands.md": {"commands": reference.commands},
    "docs/reference/settings.md": {"settings": reference.settings},
    "docs/profiling.md": {
        "profile story": profiles.story,
        "profile methods": profiles.methods,
        "profile tables": profiles.naive_tables,
        "profile kernels": profiles.naive_kernels,
        "profile verdicts": profiles.verdicts,
    },
    "docs/tuning.md": {"tune gains": tuning.gains},
    "docs/scale.md": {
        "scale replicas": scaling.replicas,
        "scale replica": scaling.replica,
        "scale tensor": scaling.tensor,
        "scale plan": scaling.plan,
        "scale simulator": scaling.simulator,
    },
}


def regenerated(page: str) -> str:
    """Return the page with its generated parts renewed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in PAGES[page].items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"\n<!-- end {name} -->")
        if not begin or not end:
            raise SystemExit(f"{page} has no place for '{name}'")
        text = before + begin + make() + end + after
    return text


def main() -> None:
    for path in sorted((ROOT / "results").rglob("*.jsonl")):
        if count := stamp(path):
            print(f"{path.relative_to(ROOT)}: {count} rows given their commit")
    if count := profiles.stamp():
        print(f"{count} sessions given their commit")
    benchmarks.draw()
    ladders.draw()
    tuning.draw()
    profiles.draw()
    scaling.draw()
    drawings.draw()
    tuning.ship()
    for page in PAGES:
        (ROOT / page).write_text(regenerated(page), encoding="utf-8")
        print(f"{page} regenerated")


if __name__ == "__main__":
    main()
