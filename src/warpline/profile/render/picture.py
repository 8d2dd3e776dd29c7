"""Draws steps of several sessions as coloured bars in one picture, for a page that cannot run a script."""

from __future__ import annotations

import html
from collections.abc import Sequence

from warpline.profile import tree
from warpline.profile.classify import classify
from warpline.profile.names import ATTENTION, BLOCKS, MLP, merged
from warpline.profile.session import Phase, Session

#: Parts of a step in the order of the bar, and their colours.
PARTS = {
    "attention": "#7c3aed",
    "MLP": "#c2410c",
    "LayerNorms, residuals": "#0e7490",
    "LM head": "#4d7c0f",
    "the rest": "#64748b",
    "exchanges": "#be185d",
    "waiting": "#fca5a5",
}
_WIDTH, _LEFT, _BAR, _PITCH, _TOP = 860, 150, 22, 34, 56


def shares(phase: Phase) -> dict[str, float]:
    """Return µs of each part of an unrecorded step: the recorded parts, scaled, with the gaps of an unrecorded step."""
    root = tree.build(phase)
    found = dict.fromkeys(PARTS, 0.0)
    exchanges = {merged(row.path) for row in phase.kernels if classify(row.name) == "exchange"}
    for _, node in root.walk():
        if node.children:
            continue
        if node.path in exchanges:
            part = "exchanges"
        elif node.path[:2] == (BLOCKS, ATTENTION):
            part = "attention"
        elif node.path[:2] == (BLOCKS, MLP):
            part = "MLP"
        elif node.path[0:1] == (BLOCKS,):
            part = "LayerNorms, residuals"
        else:
            part = "LM head" if "LM head" in " ".join(node.path) else "the rest"
        found[part] += node.busy_us * phase.free_busy_us / (phase.busy_us or 1.0)
    found["waiting"] = phase.free_us - phase.free_busy_us
    return found


def bars(sessions: Sequence[Session], phase: str) -> str:
    """Return the picture as SVG, on white, so that it can be read on any page."""
    rows = [(session.method, session.dtype, shares(session.phase(phase))) for session in sessions]
    longest = max(sum(parts.values()) for _, _, parts in rows)
    height = _TOP + _PITCH * len(rows) + 10
    first = sessions[0]
    title = f"A {phase} step: {first.model}, batch {first.batch}, context {first.context}, {first.device}"
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="20" font-weight="bold" fill="#0f172a">{html.escape(title)}</text>',
    ]
    at = 8.0
    for name, colour in PARTS.items():
        if not any(parts[name] for _, _, parts in rows):
            continue
        found.append(f'<rect x="{at:.0f}" y="31" width="12" height="12" fill="{colour}"/>')
        found.append(f'<text x="{at + 17:.0f}" y="42" fill="#334155">{name}</text>')
        at += 34 + 7.2 * len(name)
    for i, (method, dtype, parts) in enumerate(rows):
        top, x = _TOP + _PITCH * i, float(_LEFT)
        found.append(f'<text x="8" y="{top + 16}" fill="#0f172a">{html.escape(method)} {dtype}</text>')
        for name, us in parts.items():
            if not us:
                continue
            width = us / longest * (_WIDTH - _LEFT - 100)
            found.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{PARTS[name]}">'
                f"<title>{name}: {us:,.1f} µs</title></rect>"
            )
            x += width
        found.append(f'<text x="{x + 6:.1f}" y="{top + 16}" fill="#0f172a">{sum(parts.values()):,.0f} µs</text>')
    return "\n".join([*found, "</svg>\n"])
