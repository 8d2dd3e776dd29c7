"""The page of the package: README, without links that only a repository can follow.

Called when a package is built. With a `Source` among the project's URLs links become absolute; without one, pictures
are left out and links become words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def page(readme: str, source: str | None) -> str:
    """The text of a page that stands alone."""

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if source is None:
            return "" if picture else words
        return f"{picture}[{words}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(link, readme))


class CustomMetadataHook(MetadataHookInterface):
    """What hatchling calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the page into the package's metadata."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = page(readme, metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
