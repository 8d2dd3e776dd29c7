"""The sections that every renderer shows: each is a title with a table or a text. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from warpline.profile import tree
from warpline.profile.classify import classes, unknown
from warpline.profile.compare import Change, Comparison
from warpline.profile.launches import kernel_table, overhead
from warpline.profile.roofline import Point, class_bytes, points, project, roofs, whole
from warpline.profile.session import SOURCES, Phase, Session
from warpline.profile.verdict import verdict

#: Most kernels in a table, unless all are asked for; most letters of a name.
MOST_KERNELS, MOST_LETTERS = 20, 60
#: Titles by which renderers recognise sections.
VERDICT, SHARES = "Verdict", "Shares of the"


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its titles, or a text, or both."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""


def heading(session: Session) -> str:
    """Return one line that says what was profiled, and where."""
    origin = session.origin
    threads = f", {origin['threads']} thread(s)" if "threads" in origin else ""
    return (
        f"{session.title} · {session.model} {session.dtype} · batch {session.batch} · context {session.context} · "
        f"{session.device}{threads} · torch {origin.get('torch', '?')} · {origin.get('time', '')}"
    )


def summary(session: Session, phase: Phase) -> Section:
    """Return the figures of a step: launches, gaps, and what recording cost."""
    spent, point = overhead(phase), whole(session, phase)
    gpu = session.kind == "cuda"
    gaps = "gaps" if gpu else "Python and dispatch"
    per = 1e6 * session.batch / phase.plain_us
    rate = f", {per:,.1f} tokens/s" if phase.name == "decode" else ""
    rows = [
        ("step", f"{phase.plain_us:,.1f} µs unwatched{rate}"),
        (
            "recorded",
            f"{phase.step_us:,.1f} µs, {phase.fastest_us:,.1f} to {phase.slowest_us:,.1f} in {phase.steps} steps "
            f"({_slower(phase)})",
        ),
        (f"{'GPU' if gpu else 'operators'} busy", f"{spent.busy_us:,.1f} µs, {100 * spent.busy_share:.1f} %"),
        (gaps, f"{spent.gap_us:,.1f} µs; without them a step takes {spent.busy_us:,.1f} µs"),
    ]
    if spent.kernels:
        rows.append(("kernels per step" if gpu else "operators per step", f"{spent.kernels:,.1f}"))
    if gpu and spent.kernels:
        each = "n/a" if spent.host_us_per_launch is None else f"{spent.host_us_per_launch:.2f} µs of the host each"
        rows.append(("launches per step", f"{spent.launches:,.2f}, {each}"))
    rows += [
        ("moves at least", f"{point.bytes / 1e6:,.1f} MB, {point.flops / 1e9:,.2f} GFLOP"),
        (
            "at the roof",
            f"{point.roof_us:,.1f} µs ({session.read_gb_s:,.0f} GB/s, {session.product_tflop_s:,.2f} TFLOP/s measured)",
        ),
        ("seen by", SOURCES[phase.source]),
    ]
    return Section(f"{phase.name}", ("", ""), tuple(rows))


def _slower(phase: Phase) -> str:
    if phase.slowdown >= 1:
        return f"recording made it {100 * (phase.slowdown - 1):.0f} % slower"
    return "recording cost nothing that could be seen"


def modules(phase: Phase, *, merge: bool = True) -> Section:
    """Return the tree as a table, drawn by indentation."""
    root = tree.build(phase, merge=merge)
    rows = [
        ("  " * depth + node.name, f"{node.us:,.1f}", f"{100 * node.share_of(root):.1f}", f"{node.gap_us:,.1f}")
        for depth, node in root.walk()
    ]
    return Section("Modules", ("module", "µs", "%", "of it waiting µs"), tuple(rows))


def four_tables(phase: Phase) -> list[Section]:
    """Return the tables of model, block, attention and MLP, with the share of each part."""
    return [
        Section(
            f"{SHARES} {table.title} ({table.us:,.1f} µs)",
            (table.title, "µs", "%"),
            tuple((name, f"{us:,.1f}", f"{100 * share:.1f}") for name, us, share in table.rows),
        )
        for table in tree.tables(phase)
    ]


def kernels(session: Session, phase: Phase, *, most: int | None = MOST_KERNELS) -> Section:
    """Return the table of all kernels, or of the `most` longest."""
    lines = kernel_table(session, phase)
    rows = [
        (
            shortened(line.name),
            line.kind,
            " / ".join(line.module) or "step",
            f"{line.calls:,.2f}".rstrip("0").rstrip("."),
            "" if line.per_layer is None else f"{line.per_layer:.2f}".rstrip("0").rstrip("."),
            f"{line.us:,.1f}",
            f"{line.mean_us:,.2f}",
            f"{100 * line.share:.1f}",
        )
        for line in lines[:most]
    ]
    rest = lines[most:] if most is not None else []
    text = f"{len(rest)} more take {sum(line.us for line in rest):,.1f} µs." if rest else ""
    what = "Kernels" if session.kind == "cuda" else "Operators"
    titles = ("kernel", "class", "module", "calls/step", "calls/layer", "µs/step", "mean µs", "% of busy")
    return Section(what, titles, tuple(rows), text)


def shortened(name: str) -> str:
    """Return a kernel's name, cut to `MOST_LETTERS`."""
    name = name.removeprefix("void ")
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"


def by_class(session: Session, phase: Phase) -> Section:
    """Return the time per class, and the names that could not be classified."""
    moved = class_bytes(session, phase)
    rows = tuple(
        (
            row.kind,
            f"{row.us:,.1f}",
            f"{100 * row.share:.1f}",
            f"{row.calls:,.1f}",
            f"{moved[row.kind] / 1e6:,.2f}" if row.kind in moved else "",
        )
        for row in classes(phase)
    )
    others = unknown(phase)
    text = (
        f"Not classified: {', '.join(map(shortened, others[:12]))}{' …' if len(others) > 12 else ''}." if others else ""
    )
    return Section("Classes", ("class", "µs", "% of busy", "calls/step", "MB"), rows, text)


def roofline(session: Session, phase: Phase) -> Section:
    """Return bytes, FLOPs and rates of each module beside its time."""
    limits = roofs(session)
    rows = [_roof_row(point) for point in [*points(session, phase), whole(session, phase)]]
    titles = ("module", "µs busy", "waiting", "MB", "GFLOP", "GB/s", "TFLOP/s", "FLOP/B", "bound by", "% of roof")
    text = f"Roofs measured here: {limits.read_gb_s:,.0f} GB/s, {limits.tflop_s:,.2f} TFLOP/s."
    if any(point.share > 1 for point in points(session, phase)):
        better = "" if session.kind == "cpu" else ", or is read better than by torch, whose rate is the roof"
        text += f" Above 100 %: its data were still in a cache{better}."
    return Section("Roofline", titles, tuple(rows), text)


def _roof_row(point: Point) -> tuple[str, ...]:
    return (
        point.name,
        f"{point.us:,.1f}",
        f"{point.wait_us:,.1f}",
        f"{point.bytes / 1e6:,.2f}",
        f"{point.flops / 1e9:,.3f}",
        f"{point.gb_s:,.1f}",
        f"{point.tflop_s:,.3f}",
        f"{point.intensity:,.2f}",
        point.bound,
        f"{100 * point.share:.0f}",
    )


def projection(session: Session, phase: Phase, gpu: str) -> Section:
    """Return the table of the same work projected onto another GPU."""
    target, rows = project(session, phase, gpu)
    text = (
        f"A projection, not a measurement: {target.name} by its datasheet ({target.read_gb_s:,.0f} GB/s, "
        f"{target.tflop_s:,.1f} TFLOP/s). Modules bound by bytes or FLOPs are expected to reach the same share of the "
        "roof there. The others depend on host and latency, and have no estimate."
    )
    titles = ("module", "µs here", "µs at its roof", "µs expected")
    used = len(titles) if any(row.expected_us is not None for row in rows) else len(titles) - 1
    lines = [
        (
            row.name,
            f"{row.here_us:,.1f}",
            f"{row.roof_us:,.1f}",
            "" if row.expected_us is None else f"{row.expected_us:,.1f}",
        )[:used]
        for row in rows
    ]
    return Section(f"Projected onto {target.name}", titles[:used], tuple(lines), text)


def phase_sections(
    session: Session, phase: Phase, *, merge: bool = True, gpu: str | None = None, most: int | None = MOST_KERNELS
) -> list[Section]:
    """Return all sections of a phase, in order."""
    found = [
        summary(session, phase),
        Section(VERDICT, text=verdict(session, phase)),
        modules(phase, merge=merge),
        *four_tables(phase),
        by_class(session, phase),
        kernels(session, phase, most=most),
        roofline(session, phase),
    ]
    return found + ([projection(session, phase, gpu)] if gpu is not None else [])


def compared(comparison: Comparison, *, most: int = MOST_KERNELS) -> list[Section]:
    """Return the sections of a comparison: modules and kernels."""
    titles = ("µs before", "µs after", "difference", "after/before")
    rows = tuple(("  " * c.depth + c.name, *_change(c)) for c in comparison.modules)
    changed = tuple((shortened(c.name), *_change(c)) for c in comparison.kernels[:most])
    notes = "Not the same: " + "; ".join(comparison.notes) + "." if comparison.notes else ""
    return [
        Section(f"{comparison.phase}: modules", ("module", *titles), rows, notes),
        Section(f"{comparison.phase}: kernels", ("kernel", *titles), changed),
    ]


def _change(change: Change) -> tuple[str, ...]:
    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:,.1f}"

    ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
    return figure(change.before), figure(change.after), f"{change.difference:+,.1f}", ratio
