"""Generated parts of the documentation are what the generator makes of the catalog and of results/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.readme import PAGES, ROOT, regenerated
from warpline.bench import rows
from warpline.errors import ConfigError


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_not_stale(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == regenerated(page), "run: make readme"


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.jsonl")), ids=lambda path: path.name)
def test_results_say_where_they_come_from(path: Path) -> None:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert row["schema"] <= rows.SCHEMA
        assert len(row["commit"]) == 40
        assert len(row["source"]) == 16
        assert row["gpu"]
        assert row["time"]


def test_rows_are_appended_and_never_replaced(tmp_path: Path) -> None:
    first = rows.append(tmp_path, "kernels", [{"gpu": "NVIDIA H200", "us": 1}])
    second = rows.append(tmp_path, "kernels", [{"gpu": "NVIDIA H200", "us": 2}])
    assert first == second == tmp_path / "nvidia-h200" / "kernels.jsonl"
    assert [json.loads(line)["us"] for line in first.read_text().splitlines()] == [1, 2]


def test_rows_measured_elsewhere_get_their_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kernels.jsonl"
    ours, other = rows.source_digest(), "0" * 16
    found = [{"commit": None, "source": ours}, {"commit": None, "source": other}, {"commit": "a" * 40, "source": ours}]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    monkeypatch.setattr(rows, "_git", lambda *words: "b" * 40 if words[0] == "rev-parse" else " M src/x.py")
    with pytest.raises(ConfigError, match="committed"):
        rows.stamp(path)
    monkeypatch.setattr(rows, "_git", lambda *words: "b" * 40 if words[0] == "rev-parse" else "")
    assert (rows.stamp(path), rows.stamp(path)) == (1, 0)
    assert [json.loads(line)["commit"] for line in path.read_text().splitlines()] == ["b" * 40, None, "a" * 40]


def test_digest_follows_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = rows.source_digest()
    assert before == rows.source_digest()
    package = tmp_path / "warpline"
    (package / "bench").mkdir(parents=True)
    (package / "bench" / "rows.py").write_text("changed")
    monkeypatch.setattr(rows, "__file__", str(package / "bench" / "rows.py"))
    assert rows.source_digest() != before
