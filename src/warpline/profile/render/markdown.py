"""Renders a session as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from warpline.profile.compare import Comparison
from warpline.profile.render import sections as s
from warpline.profile.session import Session


def table(section: s.Section) -> str:
    """Return a section's table and text. Indentation becomes non-breaking spaces, because Markdown drops it."""
    parts = []
    if section.rows:
        lines = [section.columns, ("---",) + ("---:",) * (len(section.columns) - 1), *map(_kept, section.rows)]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    parts += [section.text] if section.text else []
    return "\n\n".join(parts)


def _kept(row: tuple[str, ...]) -> tuple[str, ...]:
    first = row[0].replace("|", "\\|")
    indent = len(first) - len(first.lstrip())
    return ("&nbsp;" * 2 * (indent // 2) + first.lstrip(), *(cell.replace("|", "\\|") for cell in row[1:]))


def whole(session: Session, *, merge: bool = True, gpu: str | None = None, most: int | None = s.MOST_KERNELS) -> str:
    """Return the whole report."""
    parts = ["# warpline profile", s.heading(session)]
    parts += [f"*{note}.*" for note in session.notes]
    for phase in session.phases:
        for i, section in enumerate(s.phase_sections(session, phase, merge=merge, gpu=gpu, most=most)):
            parts += [f"{'##' if i == 0 else '###'} {section.title}", table(section)]
    return "\n\n".join(parts) + "\n"


def comparison(found: Sequence[Comparison]) -> str:
    """Return the comparison of two sessions."""
    parts = ["# warpline profile compare"]
    for one in found:
        for section in s.compared(one):
            parts += [f"## {section.title}", table(section)]
    return "\n\n".join(parts) + "\n"
