"""The parts of docs/profiling.md that are made from results/*/profile/*.json: for each machine and model the way from
the naive model to the fastest, a table of methods and a picture; and sections of the naive model's own profile."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from warpline.bench import rows
from warpline.bench.methods.names import METHODS
from warpline.profile import tree
from warpline.profile.launches import overhead
from warpline.profile.render import markdown, picture, sections
from warpline.profile.roofline import whole
from warpline.profile.session import PHASES, Session, read
from warpline.profile.verdict import findings, verdict

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
NOTHING = "No session has been recorded yet."

#: The steps from the naive model to the fastest, and what each one changes.
STATIONS = {
    ("naive", "fp32"): "the textbook model: every token recomputes the whole text, attention step by step",
    ("naive", "fp16"): "the same in half precision",
    ("torch", "fp32"): "with a KV cache, attention as one operator",
    ("torch", "fp16"): "with a KV cache, attention as one operator",
    ("static-kv", "fp16"): "a cache of fixed size, so that nothing depends on the host",
    ("static-kv-graph", "fp16"): "the step captured in a CUDA graph",
    ("static-kv-compile", "fp32"): "a cache of fixed size, operators fused by torch.compile",
    ("static-kv-compile", "fp16"): "kernels fused by torch.compile, in a CUDA graph: the strongest PyTorch",
    ("kernels", "fp16"): "our own kernels, LayerNorm, GELU and residuals fused into products, launched one by one",
    ("graph", "fp16"): "the same captured in a graph, launches overlapping",
    ("persistent", "fp16"): "one launch decodes many tokens",
    ("cpu", "fp32"): "a team of threads runs one compiled function for many tokens",
    ("cpu-int8", "int8"): "the same with one byte per weight",
}


def stamp() -> int:
    """Give sessions of uncommitted code the commit that has exactly this code, as for rows; return how many."""
    waiting = []
    for path in sorted((ROOT / "results").glob("*/profile/*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["origin"]["commit"] is None or raw["origin"]["dirty"]:
            waiting.append((path, raw))
    commits = rows._commits({raw["origin"]["source"] for _, raw in waiting})
    found = [(path, raw) for path, raw in waiting if raw["origin"]["source"] in commits]
    for path, raw in found:
        raw["origin"] |= {"commit": commits[raw["origin"]["source"]], "dirty": False}
        path.write_text(json.dumps(raw, separators=(",", ":")) + "\n", encoding="utf-8")
    sessions.cache_clear()
    return len(found)


@functools.cache
def sessions() -> dict[tuple[str, str], list[Session]]:
    """Return the sessions by machine's folder and model, GPUs first; methods in the benchmark's order, fp32 first."""
    found: dict[tuple[str, str], list[Session]] = {}
    paths = sorted((ROOT / "results").glob("*/profile/*.json"), key=lambda path: (path.parts[-3] == "cpu", path))
    for path in paths:
        session = read(path)
        found.setdefault((path.parts[-3], session.model), []).append(session)
    order = list(METHODS)
    for group in found.values():
        group.sort(key=lambda one: (order.index(one.method), one.dtype != "fp32"))
    return found


def pictures() -> dict[str, str]:
    """Return every picture by file name."""
    return {_image(*key, phase): picture.bars(group, phase) for key, group in sessions().items() for phase in PHASES}


def _image(machine: str, model: str, phase: str) -> str:
    return f"profile-{machine}-{model.replace(':', '-')}-{phase}.svg"


def draw() -> None:
    """Write the pictures, and remove those that are no longer shown."""
    wanted = pictures()
    for path in IMAGES.glob("profile-*.svg"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (IMAGES / name).write_text(text, encoding="utf-8")


def methods() -> str:
    """Return a picture and a table for each machine, model and phase: where each method's step spends its time."""
    parts = []
    for (machine, model), group in sessions().items():
        first = group[0]
        threads = f", {first.origin['threads']} thread(s)" if "threads" in first.origin else ""
        parts.append(f"### {first.device}{threads}: {model}")
        for phase in PHASES:
            parts.append(f"![A {phase} step, by part](images/{_image(machine, model, phase)})")
            parts.append(_table(group, phase))
    return "\n\n".join(parts) or NOTHING


def story() -> str:
    """Return the steps of decoding from the naive model on: time per token, bottleneck, gain over the step before."""
    parts = []
    for (_, model), group in sessions().items():
        by_name = {(one.method, one.dtype): one for one in group}
        there = [by_name[name] for name in STATIONS if name in by_name]
        lines = [f"{i}. {_station(session, there[i - 2] if i > 1 else None)}" for i, session in enumerate(there, 1)]
        parts.append("\n".join([f"**{group[0].device}, {model}**", "", *lines]))
    return "\n\n".join(parts) or NOTHING


def _station(session: Session, before: Session | None) -> str:
    phase = session.phase("decode")
    faster = ""
    if before is not None:
        ratio = before.phase("decode").plain_us / phase.plain_us
        faster = f", {ratio:.2f}× as fast as the previous one"
    best = findings(session, phase)
    holds = f"{best[0].cause} Removing this gains at most {best[0].gain:.2f}×." if best else "No bottleneck was found."
    share = 100 * min(1.0, whole(session, phase).roof_us / phase.free_us)
    new = STATIONS[session.method, session.dtype]
    return (
        f"`{session.method}` {session.dtype}, {new}: **{phase.plain_us:,.0f} µs** a token{faster}, {share:.0f} % of "
        f"the limit. {holds}"
    )


def _table(group: list[Session], name: str) -> str:
    lines = []
    for session in group:
        phase = session.phase(name)
        spent, point = overhead(phase), whole(session, phase)
        best = findings(session, phase)
        remedy = f"{best[0].kind}: {best[0].gain:.2f}×" if best else ""
        lines.append(
            (
                f"`{session.method}` {session.dtype}",
                f"{phase.plain_us:,.0f}",
                f"{100 * phase.slowdown - 100:+.0f} %",
                f"{phase.free_busy_us:,.0f}",
                f"{spent.kernels:,.0f}",
                f"{spent.launches:,.1f}" if session.kind == "cuda" else "",
                f"{session.read_gb_s:,.0f}",
                f"{session.product_tflop_s:,.2f}",
                f"{100 * min(1.0, point.roof_us / phase.free_us):.0f}",
                remedy,
            )
        )
    titles: tuple[str, ...] = (name, "µs/step", "when recorded", "busy µs", "kernels or operators", "launches")
    titles += ("GB/s read", "TFLOP/s", "% of the roof", "first remedy")
    return markdown.table(sections.Section("", titles, tuple(lines)))


def _told() -> Session | None:
    """Return the session with tables shown in full: the naive model in fp32, on a GPU if there is one."""
    groups = [group for (_, model), group in sessions().items() if model == "random:gpt2"]
    return next((one for group in groups for one in group if one.method == "naive" and one.dtype == "fp32"), None)


def naive_tables() -> str:
    """Return the four tables of the naive model."""
    session = _told()
    if session is None:
        return NOTHING
    parts = [sections.heading(session) + "."]
    for name in PHASES:
        parts.append(f"**{name}** (a step of {tree.build(session.phase(name)).us:,.0f} µs, recorded)")
        parts += [markdown.table(section) for section in sections.four_tables(session.phase(name))]
    return "\n\n".join(parts)


def naive_kernels() -> str:
    """Return the classes, the longest kernels and the roofline of the naive model's decode step."""
    session = _told()
    if session is None:
        return NOTHING
    phase = session.phase("decode")
    found = [
        sections.by_class(session, phase),
        sections.kernels(session, phase, most=10),
        sections.roofline(session, phase),
        sections.projection(session, phase, "t4"),
    ]
    return "\n\n".join(f"**{section.title}**\n\n{markdown.table(section)}" for section in found)


def verdicts() -> str:
    """Return the profiler's verdict on each method."""
    lines = []
    for group in sessions().values():
        for session in group:
            for phase in session.phases:
                lines.append(f"- `{session.method}`, {session.model} {session.dtype}, {session.device}: "
                             f"{verdict(session, phase)}")  # fmt: skip
    return "\n".join(lines) or NOTHING
