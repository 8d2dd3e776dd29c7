"""The hooks of the documentation site (mkdocs.yml): pages that lie outside docs/, and links that leave it.

README is the site's first page; CONTRIBUTING and CHANGELOG are pages too. A link to another file of the repository
becomes a link to its source where mkdocs.yml has a `repo_url`, and otherwise its words.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Files of the repository that are pages of the site, and their names there.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\)|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")
_CODE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links as the site has them."""
    name = page.file.src_uri
    sources = {generated: source for source, generated in PAGES.items()}
    return relinked(markdown, sources.get(name, f"docs/{name}"), name, config.get("repo_url"))


def relinked(markdown: str, source: str, page: str, repository: str | None) -> str:
    """The text of a file of the repository, as the page of this name."""

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        words = _LINK.sub(link, words)  # a picture that is a link
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is not None:
            return f"{picture}[{words}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{mark}{anchor})"
        if not repository:
            return words
        return f"{picture}[{words}]({repository.rstrip('/')}/blob/main/{path}{mark}{anchor})"

    parts, at = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _LINK.sub(link, markdown[at:])])
