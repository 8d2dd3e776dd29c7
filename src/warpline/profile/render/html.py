"""Renders a session as one page that loads nothing from elsewhere: tree, sortable tables, a roofline with tooltips, a
timeline with zoom, the verdict. Its colours follow the reader's light or dark theme."""

from __future__ import annotations

import html
import json
from importlib import resources

from warpline.profile import tree
from warpline.profile.classify import classify
from warpline.profile.render import sections as s
from warpline.profile.render.roofchart import roofline
from warpline.profile.session import Phase, Session

_PARTS = __package__ or ""


def page(session: Session, *, gpu: str | None = None) -> str:
    """Return the page; `gpu` adds a projection onto that card."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>warpline profile: {_safe(session.label)}</title><style>{_part('page.css')}</style></head><body>",
        f"<h1>warpline profile</h1><p class='soft'>{_safe(s.heading(session))}</p>",
        *(f"<p class='soft'>Note: {_safe(note)}.</p>" for note in session.notes),
    ]
    for phase in session.phases:
        parts += _phase(session, phase, gpu)
    parts.append(f"<div id='tip' role='tooltip'></div><script>{_part('page.js')}</script></body></html>\n")
    return "\n".join(parts)


def _part(name: str) -> str:
    return resources.files(_PARTS).joinpath(name).read_text(encoding="utf-8")


def _safe(text: object) -> str:
    return html.escape(str(text), quote=True)


def _phase(session: Session, phase: Phase, gpu: str | None) -> list[str]:
    found = {section.title: section for section in s.phase_sections(session, phase, gpu=gpu, most=None)}
    kernels = found.pop("Kernels", None) or found.pop("Operators")
    figures, verdict = found.pop(phase.name), found.pop("Verdict")
    found.pop("Modules")
    shares = [found.pop(title) for title in list(found) if title.startswith("Shares of")]
    parts = [
        f"<h2>{_safe(phase.name)}</h2><p class='verdict'>{_safe(verdict.text)}</p>{_table(figures, 'plain')}",
        f"<p><input class='search' type='search' placeholder='search modules and kernels' data-for='{phase.name}' "
        f"aria-label='search'> <output class='soft' id='found-{phase.name}'></output></p>",
        "<h3>Flame graph</h3>",
        _flame(phase),
        "<h3>One step on the timeline</h3>",
        _timeline(phase),
        "<h3>Modules, layers merged</h3>",
        _tree(phase, merge=True),
        f"<details><summary>Each layer apart</summary>{_tree(phase, merge=False)}</details>",
        "<div class='grid'>",
        *(f"<div><h3>{_safe(one.title)}</h3>{_table(one)}</div>" for one in shares),
        "</div><h3>Roofline</h3><div class='wide'>",
        roofline(session, phase),
        "</div>",
    ]
    for section in found.values():
        parts.append(f"<h3>{_safe(section.title)}</h3>{_table(section, 'sortable')}")
    return [*parts, f"<h3>{_safe(kernels.title)}</h3>{_table(kernels, 'sortable kernels')}"]


def _table(section: s.Section, kind: str = "") -> str:
    head = "".join(f"<th>{_safe(title)}</th>" for title in section.columns) if any(section.columns) else ""
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in section.rows)
    text = f"<p class='soft'>{_safe(section.text)}</p>" if section.text else ""
    if not section.rows:
        return text
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<div class='wide'><table class='{kind}'>{inside}</table></div>{text}"


def _tree(phase: Phase, *, merge: bool) -> str:
    root = tree.build(phase, merge=merge)
    return f"<div class='tree'>{_node(root, root, deep=merge)}</div>"


def _node(node: tree.Node, root: tree.Node, *, deep: bool) -> str:
    share = node.share_of(root)
    busy = node.busy_us / node.us if node.us else 1.0
    bar = f"<i class='bar' style='width:{100 * share * 0.9:.2f}%;--busy:{100 * busy:.0f}%'></i>"
    row = (
        f"<span class='row'><span>{_safe(node.name)}</span><span>{node.us:,.1f} µs</span>"
        f"<span>{100 * share:.1f} %</span><span>{bar}</span></span>"
    )
    if not node.children:
        return f"<div class='leaf'>{row}</div>"
    inside = "".join(_node(child, root, deep=deep) for child in node.children.values())
    is_open = " open" if deep or node is root else ""
    return f"<details{is_open}><summary>{row}</summary>{inside}</details>"


def _flame(phase: Phase) -> str:
    """Return the tree as data for a flame graph, drawn by the script: boxes within boxes, each as wide as its time."""
    name = f"flame-{phase.name}"
    data = json.dumps(_boxes(tree.build(phase, merge=False)), separators=(",", ":")).replace("</", "<\\/")
    return (
        f"<div class='flame' data-source='{name}' role='img' aria-label='flame graph of {phase.name}'></div>"
        f"<script type='application/json' id='{name}'>{data}</script>"
        "<p class='soft'>A box is as wide as its time, its parts stand below it. A click on a box shows it alone.</p>"
    )


def _boxes(node: tree.Node) -> list[object]:
    """Return name, µs, µs of waiting among them, and parts."""
    parts = [_boxes(child) for child in node.children.values()]
    return [node.name, round(node.us, 2), round(node.gap_us, 2), parts]


def _timeline(phase: Phase) -> str:
    """Return the moments of the first step as data, drawn by the script. Hatching shows where nothing ran between the
    step's begin and end on the device; a host's work for a GPU that is behind lies before that."""
    step = next((m for m in phase.timeline if m.track == "step"), None)
    if step is None:
        return "<p class='soft'>This session was kept without its timeline.</p>"
    shown = [m for m in phase.timeline if m.track != "step" and m.start < step.start + step.us]
    modules = {path: i for i, path in enumerate(dict.fromkeys(m.path for m in shown))}
    rows = [
        (m.track, m.name, " / ".join(m.path) or "step", m.start, m.us, classify(m.name), modules[m.path]) for m in shown
    ]
    name = f"timeline-{phase.name}"
    data = json.dumps({"step": [step.start, step.start + step.us], "rows": rows}, separators=(",", ":"))
    data = data.replace("</", "<\\/")
    return (
        f"<canvas class='timeline' data-source='{name}' role='img' aria-label='one {phase.name} step'></canvas>"
        f"<script type='application/json' id='{name}'>{data}</script>"
        f"<p class='soft'>{_legend(rows)} Hatched: nothing ran. The wheel with Ctrl or Shift zooms, dragging moves, a "
        "double click shows all.</p>"
    )


def _legend(rows: list[tuple[str, str, str, float, float, str, int]]) -> str:
    """Return the classes on the timeline in their colours, which the style sheet defines."""
    kinds = dict.fromkeys(kind for track, _, _, _, _, kind, _ in rows if track in ("host", "gpu"))
    return " ".join(f"<span class='kind kind-{_safe(kind)}'>{_safe(kind)}</span>" for kind in kinds)
