"""Tables as text, for a terminal of any width. Figures are never cut: what does not fit is wrapped if it is prose, put
below its row, or left out as a column, which a note reports."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

_GAP = "  "
#: Least width in letters of wrapped columns: of words, of long names, of sentences.
_WORDS, _NAME, _PROSE = 18, 30, 44
_FIGURE = re.compile(r"[~+±-]?[\d.,]+(e[+-]?\d+)?(×|[a-zA-Zµ%*†]{0,4}| [a-zA-Zµ%/]{1,4}| %?\*?)?( (loses|same))?|n/a|")


def columns() -> int | None:
    """Return the width of the output; None if it is no terminal of known width: then lines may have any length."""
    if sys.stdout is not sys.__stdout__:
        return None
    return shutil.get_terminal_size((0, 0)).columns or None


def rule(width: int | None = None) -> int:
    """Return the width for prose: the terminal's, at most 100 for easy reading."""
    return max(20, min(width or columns() or 100, 100))


def drawn(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    least: Sequence[str] = (),
    prose: str | None = None,
    bold: bool = False,
) -> str:
    """Return a table no wider than `width`. Columns named in `least` are left out first, in that order, then those to
    the right; `prose` is one with sentences that may be put below their rows."""
    table = [list(titles), *(list(row) for row in rows)]
    shown = list(range(len(titles)))
    right = [i > 0 and all(_FIGURE.fullmatch(row[i]) for row in table[1:]) for i in shown]
    natural = [max(_cells(row[i]) for row in table) for i in shown]
    narrow = [natural[i] if right[i] else min(natural[i], _narrow(row[i] for row in table)) for i in shown]
    below = None

    def too_wide() -> bool:
        needed = sum(narrow[i] for i in shown) + len(_GAP) * (len(shown) - 1)
        return width is not None and needed > width

    if prose is not None and width is not None:
        i = list(titles).index(prose)
        if sum(natural) + len(_GAP) * (len(shown) - 1) > width:
            narrow[i] = min(natural[i], _PROSE)
            if too_wide():
                shown.remove(i)
                below = i
    order = [i for name in least for i in shown if titles[i] == name]
    for i in [*order, *(i for i in reversed(shown[1:]) if i not in order)]:
        if too_wide() and len(shown) > 2:
            shown.remove(i)
    widths = list(narrow)
    spare = sum(natural) if width is None else width - sum(narrow[i] for i in shown) - len(_GAP) * (len(shown) - 1)
    if spare < 0:  # only a name and a figure are left
        widths[shown[0]] = max(1, widths[shown[0]] + spare)
    for i in shown:
        more = min(max(0, spare), natural[i] - narrow[i])
        widths[i], spare = widths[i] + more, spare - more
    lines: list[str] = []
    for number, row in enumerate(table):
        if number == 0 and not any(titles):
            continue
        parts = [_folded(row[i], widths[i]) for i in shown]
        for cells in zip_longest(*parts, fillvalue=""):
            line = _GAP.join(
                " " * (widths[i] - _cells(cell)) + cell if right[i] else cell + " " * (widths[i] - _cells(cell))
                for i, cell in zip(shown, cells, strict=True)
            ).rstrip()
            lines.append(f"\x1b[1m{line}\x1b[0m" if bold and number == 0 else line)
        if below is not None and number and row[below]:
            lines += textwrap.wrap(row[below], rule(width), initial_indent="  ", subsequent_indent="  ")
    left_out = [titles[i] for i in range(len(titles)) if i not in shown and i != below]
    if left_out:
        lines += textwrap.wrap(f"Left out, as this is narrow: {', '.join(dict.fromkeys(left_out))}.", rule(width))
    return "\n".join(lines)


def show(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, least: Sequence[str] = (), prose: str | None = None
) -> None:
    """Print a table as wide as the terminal."""
    text = drawn(titles, rows, width=columns(), least=least, prose=prose, bold=sys.stdout.isatty())
    sys.stdout.write(text + "\n")


def say(text: str, *, bold: bool = False) -> None:
    """Print prose, broken between words at the terminal's width; unbroken without a terminal."""
    if (width := columns()) is not None:
        text = "\n".join(textwrap.fill(line, width) for line in text.split("\n"))
    sys.stdout.write(f"\x1b[1m{text}\x1b[0m\n" if bold and sys.stdout.isatty() else f"{text}\n")


def _narrow(cells: Iterable[str]) -> int:
    """Return the least width of a column of words without breaking one, within limits for very long words."""
    return max(_WORDS, min(_NAME, max((_cells(word) for cell in cells for word in cell.split()), default=0)))


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _folded(text: str, width: int) -> list[str]:
    """Split into lines of that width, between words, or inside a word that is longer."""
    return [text] if _cells(text) <= width else textwrap.wrap(text, width, break_on_hyphens=False)
