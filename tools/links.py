"""Links of Markdown pages as GitHub and the site resolve them: headings, their anchors, and what points where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_TARGET = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", text)


def slugs(text: str) -> Iterator[tuple[str, str]]:
    """Its headings and their anchors; of headings with the same words the later ones are numbered."""
    seen: dict[str, int] = {}
    for found in re.finditer(r"^#{1,6} (.+?) *#*$", without_code(text), re.MULTILINE):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", found[1])
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen.get(anchor, 0)
        seen[anchor] = count + 1
        yield found[1], f"{anchor}-{count}" if count else anchor


def targets(text: str) -> list[str]:
    """Where its links point that stay in the repository."""
    plain = _CODE.sub("", without_code(text))
    return [target for target in _TARGET.findall(plain) if not re.match(r"[a-z]+:", target)]


def broken(page: Path) -> list[str]:
    """Links to files that are not there, or to anchors that no heading has."""
    found = []
    for target in targets(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            found.append(f"{target}: there is no such file")
        elif anchor and anchor not in {slug for _, slug in slugs(file.read_text(encoding="utf-8"))}:
            found.append(f"{target}: there is no such heading")
    return found
