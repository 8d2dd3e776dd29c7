"""A session in the terminal: a tree of modules with bars, and tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from warpline.profile import tree
from warpline.profile.compare import Comparison
from warpline.profile.render import sections as s
from warpline.profile.session import Phase, Session

_BAR = 20


def show(session: Session, *, merge: bool = True, gpu: str | None = None, most: int | None = s.MOST_KERNELS) -> None:
    """Print everything."""
    out = _console()
    out.print(Text(s.heading(session), style="bold"))
    for note in session.notes:
        out.print(Text(f"note: {note}"))
    for phase in session.phases:
        for section in s.phase_sections(session, phase, merge=merge, gpu=gpu, most=most):
            out.print()
            out.print(Text(section.title, style="bold"))
            out.print(modules(phase, merge=merge) if section.title == "Modules" else _section(section))


def show_comparison(found: Sequence[Comparison]) -> None:
    """Print before and after."""
    out = _console()
    for one in found:
        for section in s.compared(one):
            out.print(Text(section.title, style="bold"))
            out.print(_section(section))


def _console() -> Console:
    """As wide as the terminal, or as it needs to be where there is none."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    return console


def modules(phase: Phase, *, merge: bool = True) -> RenderableType:
    """The tree, each module with its time, its share and a bar."""
    root = tree.build(phase, merge=merge)
    drawn = Tree(_label(root, root))
    _grow(drawn, root, root)
    return drawn


def _grow(drawn: Tree, node: tree.Node, root: tree.Node) -> None:
    for child in node.children.values():
        _grow(drawn.add(_label(child, root)), child, root)


def _label(node: tree.Node, root: tree.Node) -> Text:
    share = node.share_of(root)
    waiting = f", {node.gap_us:,.0f} waiting" if node.gap_us > 0.005 * root.us else ""
    text = Text(f"{node.name}  ")
    text.append(f"{node.us:,.1f} µs {100 * share:.1f} %{waiting} ", style="cyan")
    text.append("█" * round(_BAR * share), style="yellow")
    return text


def _section(section: s.Section) -> RenderableType:
    parts: list[RenderableType] = []
    if section.rows:
        drawn = Table(box=None, header_style="bold")
        for i, title in enumerate(section.columns):
            drawn.add_column(title, justify="left" if i == 0 or not any(section.columns) else "right")
        for row in section.rows:
            drawn.add_row(*row)
        parts.append(drawn)
    if section.text:
        parts.append(Text(section.text))
    return Group(*parts)
