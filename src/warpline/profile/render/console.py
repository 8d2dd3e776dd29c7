"""Prints a session in the terminal: modules as a tree with bars, tables, and the verdict last, so it stays visible."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from warpline import tables
from warpline.profile import tree
from warpline.profile.compare import Comparison
from warpline.profile.render import sections as s
from warpline.profile.session import Phase, Session

_BAR = 20
#: Columns that a narrow table can leave out, the least important first.
LEAST = (
    *("calls/layer", "mean µs", "class", "calls/step", "TFLOP/s", "GFLOP", "FLOP/B", "waiting", "MB"),
    *("of it waiting µs", "difference"),
)


def show(
    session: Session,
    *,
    merge: bool = True,
    gpu: str | None = None,
    most: int | None = s.MOST_KERNELS,
    shares: bool = False,
) -> None:
    """Print all sections; the tables of `shares`, which the tree also has, only if asked for."""
    _title(s.heading(session))
    for note in session.notes:
        tables.say(f"note: {note}")
    for phase in session.phases:
        found = s.phase_sections(session, phase, merge=merge, gpu=gpu, most=most)
        kept = [one for one in found if shares or not one.title.startswith(s.SHARES)]
        for section in [
            *(one for one in kept if one.title != s.VERDICT),
            *(one for one in kept if one.title == s.VERDICT),
        ]:
            sys.stdout.write("\n")
            if section.title == "Modules":
                _title(section.title)
                sys.stdout.write("\n".join(modules(phase, merge=merge, width=tables.columns())) + "\n")
            else:
                _section(section)


def show_comparison(found: Sequence[Comparison]) -> None:
    """Print the comparison of each phase."""
    for one in found:
        for section in s.compared(one):
            _section(section)


def _title(text: str) -> None:
    tables.say(text, bold=True)


def _section(section: s.Section) -> None:
    _title(section.title)
    if section.rows:
        tables.show(section.columns, section.rows, least=LEAST)
    if section.text:
        tables.say(section.text)


def modules(phase: Phase, *, merge: bool = True, width: int | None = None) -> list[str]:
    """Return the lines of the tree, each module with its time, its share and a bar."""
    root = tree.build(phase, merge=merge)
    lines = [(root.name, root), *_branches(root, "")]
    name = max(len(drawn) for drawn, _ in lines)
    figures = max(len(f"{root.us:,.1f}"), 4)
    bar = _BAR if width is None else max(0, min(_BAR, width - name - figures - 15))
    found = []
    for drawn, node in lines:
        share = node.share_of(root)
        waiting = f" {node.gap_us:,.0f} waiting" if node.gap_us > 0.005 * root.us else ""
        line = f"{drawn:<{name}}  {node.us:>{figures},.1f} µs {100 * share:>5.1f} % {'█' * round(bar * share)}".rstrip()
        found.append(line + waiting if width is None or len(line + waiting) <= width else line)
    return found


def _branches(node: tree.Node, before: str) -> Iterator[tuple[str, tree.Node]]:
    """Yield the modules below a node, each name with the tree lines before it."""
    for i, child in enumerate(node.children.values(), 1):
        last = i == len(node.children)
        yield before + ("└─ " if last else "├─ ") + child.name, child
        yield from _branches(child, before + ("   " if last else "│  "))
