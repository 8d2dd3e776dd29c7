"""The documentation: links lead somewhere, the site builds without a warning, reference pages are complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warpline
from tools import links, reference, site
from tools.readme import ROOT
from warpline.cli.main import app

PAGES = [ROOT / name for name in site.PAGES] + sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert links.broken(page) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One\n\n## Two `words`\n\n## Two `words`\n")
    page.write_text(
        "# A · b\n[1](other.md#two-words) [2](other.md#two-words-1) [3](#a--b) [4](https://x) `[5](no.md)`\n"
        "```\n[6](no.md)\n# no heading\n```\n[![7](no.png)](other.md)\n"
        "[8](gone.md) [9](other.md#three) [10](#no-heading)\n"
    )
    wrong = ["no.png", "gone.md", "other.md#three", "#no-heading"]
    assert [line.partition(":")[0] for line in links.broken(page)] == wrong


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(source / "mkdocs.yml"), "-d", str(target)],
        env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "LLM.generate" in front
    assert 'href="tutorial/"' in front
    assert "https://fonts." not in front
    python = (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    for name in set(warpline.__all__) - {"__version__"}:
        assert f'id="warpline.{name}"' in python, name
    assert 'id="warpline.hf.patching.patch"' in python


def test_links_on_the_site() -> None:
    """Inside docs/ as they are, to README and its like as pages, to sources only where these have an address."""
    text = "[a](cpu.md#x) [b](../README.md) [c](../src/x.py) [d](https://e) ![e](images/f.png)\n```\n[g](../h)\n```\n"
    made = site.relinked(text, "docs/int8.md", "int8.md", None)
    assert made == "[a](cpu.md#x) [b](index.md) c [d](https://e) ![e](images/f.png)\n```\n[g](../h)\n```\n"
    made = site.relinked(
        "[c](../../src/x.py) [b](../../CONTRIBUTING.md)", "docs/kernels/a.md", "kernels/a.md", "https://r/"
    )
    assert made == "[c](https://r/blob/main/src/x.py) [b](../contributing.md)"
    made = site.relinked("[![p](docs/images/p.svg)](docs/cpu.md) [n](CHANGELOG.md)", "README.md", "index.md", None)
    assert made == "[![p](images/p.svg)](cpu.md) [n](changelog.md)"


def test_every_page_is_in_the_navigation() -> None:
    """`mkdocs build --strict` says so as well, where it is installed."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.md"):
        assert str(path.relative_to(ROOT / "docs")) in text


def test_commands_and_settings_are_all_there() -> None:
    text = reference.commands()
    for command in app.registered_commands:
        assert f"\n## warpline {command.name}\n" in f"\n{text}"
    for line in ("## warpline bench", "### warpline bench serve", "### warpline kernels compile"):
        assert f"{line}\n" in text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) == len(set(headings))
    assert "| `--max-new-tokens`, `--max-tokens`, `--new-tokens` | `256` | Tokens to generate at most. |" in text
    settings = reference.settings()
    for name in warpline.SamplingParams.__dataclass_fields__:
        row = next(line for line in settings.splitlines() if line.startswith(f"| `{name}` |"))
        assert not row.endswith("|  |"), f"{name} has no meaning: a comment (#:) above it, or a line under Args"
    assert "| `seconds` | `float` |  | Seconds from the prompt to the last token. |" in settings


def test_every_entry_of_the_log_begins_with_its_conclusion() -> None:
    entries = [line for line in reference.contents().splitlines() if line.startswith("- ")]
    assert len(entries) > 50
    assert not [line for line in entries if "): " not in line]


def test_lines_of_the_log_are_short() -> None:
    """But for tables, headings and the table of contents, which is made."""
    _, _, text = reference.LOG.read_text(encoding="utf-8").partition("<!-- end contents -->")
    assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "#"))]
