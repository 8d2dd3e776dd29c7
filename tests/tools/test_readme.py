"""Generated parts of the documentation match the generator's output from the catalog and results/."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.test_ladder_report import recorded
from tests.profile.conftest import made_up
from tools import benchmarks, claims, drawings, ladders, profiles
from tools.readme import PAGES, ROOT, regenerated
from warpline.bench import ladder_report, rows
from warpline.cli.profile import kept_name
from warpline.kernels.ladder import LADDERS
from warpline.kernels.ladder.rung import Ladder
from warpline.profile.session import read, save


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_not_stale(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == regenerated(page), "run: make readme"


#: Pages with typed figures: of runs without rows, and of clocks and limits.
TYPED = ("log", "huggingface", "scale", "serving")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(str(p.relative_to(ROOT)) for glob in ("*.md", "reference/*.md") for p in (ROOT / "docs").glob(glob)),
    ],
)
def test_no_speed_is_typed_by_hand(page: str) -> None:
    """Speeds in documents are generated from results/, between the generator's marks."""
    if Path(page).stem in TYPED:
        pytest.skip("figures are typed here")
    text = (ROOT / page).read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- begin (.+?) -->.*?<!-- end \1 -->", "", text, flags=re.DOTALL)
    found = re.findall(r"[\d.,]+ ?(?:tok/s|tokens/s|µs|ms|GB/s|×)(?!\w)", by_hand)
    assert found == []


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.jsonl")), ids=lambda path: path.name)
def test_results_say_where_they_come_from(path: Path) -> None:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert row["schema"] <= rows.SCHEMA
        assert len(row["commit"]) == 40
        assert not row["dirty"]
        assert len(row["source"]) == 16
        assert row["gpu"] or row["device"]
        assert row["time"]


def test_pictures_are_not_stale() -> None:
    wanted = benchmarks.drawn()
    assert {path.name for path in benchmarks.IMAGES.glob("bench-*.png")} == set(wanted), "run: make readme"
    assert not [name for name, (_, rows) in wanted.items() if benchmarks.is_stale(name, rows)], "run: make readme"


def test_the_table_of_the_readme_compares_within_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows, of the newest runs that have what a user calls; a newer run replaces both figures of its row."""
    lines = claims.calls().splitlines()
    assert sum(line.startswith("| `LLM.generate`") for line in lines) == 5
    real = benchmarks.recorded()
    machine, model, dtype = benchmarks.SHOWN
    case = {"workload": "reference", "model": model, "dtype": dtype, "batch": 1}
    ours = next(row for row in claims._gpu_run("reference", 1).values() if row["method"] == "warpline")
    assert case.items() <= ours.items()
    newer = [
        ours | {"time": "2100-01-01", "tokens_per_second": 3000.0},
        ours | {"time": "2100-01-01", "tokens_per_second": 1500.0, "method": "hf-sdpa", "seconds": 1.0},
    ]
    monkeypatch.setattr(benchmarks, "recorded", lambda: real | {machine: [*real[machine], *newer]})
    changed = claims.calls().splitlines()
    assert "| `LLM.generate`, one prompt | 16 + 100 | **3,000** | `transformers` | 1,500 | 2.0× |" in changed
    assert changed[3:] == lines[3:]
    newer += [ours | {"time": "2100-01-02", "status": "failed", "why": "x"}]
    with pytest.raises(SystemExit, match="the newest run of reference has no time of warpline"):
        claims.calls()


def test_servers_are_compared_within_a_run() -> None:
    lines = [line for line in claims.served().splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == list(claims.SERVERS)


def test_drawings_are_not_stale() -> None:
    for name, make in drawings.DRAWINGS.items():
        text = (drawings.IMAGES / name).read_text(encoding="utf-8")
        assert text == make(), "run: make readme"
        ElementTree.fromstring(text)


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


def test_climbs_are_not_stale() -> None:
    wanted = ladders.climbs()
    assert {path.name for path in ladders.IMAGES.glob("ladder-*.svg")} == set(wanted), "run: make readme"
    for name, climb in wanted.items():
        assert (ladders.IMAGES / name).read_text(encoding="utf-8") == ladder_report.svg(climb), "run: make readme"


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_every_rung_is_explained(ladder: Ladder) -> None:
    text = (ROOT / ladders.PAGE.format(ladder.name)).read_text(encoding="utf-8")
    for rung in ladder.rungs:
        assert f"- **{rung.name}**{' (aside)' if rung.variant else ''}: " in text


def test_climbs_are_put_into_their_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ladders, "ROOT", tmp_path)
    monkeypatch.setattr(ladders, "IMAGES", tmp_path)
    assert ladders.measured("gelu").startswith("Not measured yet: `warpline ladder gelu --save results`")
    rows.append(tmp_path / "results", "ladder", recorded("gelu"))
    (tmp_path / "ladder-old.svg").write_text("")
    ladders.draw()
    (picture,) = tmp_path.glob("ladder-*.svg")
    assert f"(../images/{picture.name})" in ladders.measured("gelu")
    assert "0.50× loses" in ladders.measured("gelu")
    assert "NVIDIA Test: From 'naive' to 'exp2'" in ladders.overview()
    assert "not yet" in ladders.overview()


def test_a_changed_row_makes_its_picture_stale() -> None:
    name, (_, group) = next(iter(benchmarks.drawn().items()))
    changed = [group[0] | {"tokens_per_second": 1.0}, *group[1:]]
    assert benchmarks.is_stale(name, changed)
    assert benchmarks.is_stale("bench-nothing.png", group)


def test_rows_are_appended_and_never_replaced(tmp_path: Path) -> None:
    first = rows.append(tmp_path, "kernels", [{"gpu": "NVIDIA H200", "us": 1}])
    second = rows.append(tmp_path, "kernels", [{"gpu": "NVIDIA H200", "us": 2}])
    assert first == second == tmp_path / "nvidia-h200" / "kernels.jsonl"
    assert [json.loads(line)["us"] for line in first.read_text().splitlines()] == [1, 2]


def test_rows_measured_elsewhere_get_their_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A repository with two commits: rows of either's code get that commit, others stay unchanged."""
    package = tmp_path / "src" / "warpline"
    (package / "bench").mkdir(parents=True)
    monkeypatch.setattr(rows, "__file__", str(package / "bench" / "rows.py"))
    rows._run("init", "-q")
    digests, commits = [], []
    for text in ("first", "second"):
        (package / "bench" / "rows.py").write_text(text)
        rows._run("add", "-A")
        rows._run("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", text)
        digests.append(rows.source_digest())
        commits.append(rows._git("rev-parse", "HEAD"))
    (package / "bench" / "rows.py").write_text("third, not committed")
    found = [
        {"commit": None, "source": digests[0]},
        {"commit": "a" * 40, "dirty": True, "source": digests[1]},
        {"commit": None, "source": rows.source_digest()},
        {"commit": "a" * 40, "dirty": False, "source": digests[0]},
    ]
    path = tmp_path / "kernels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    assert (rows.stamp(path), rows.stamp(path)) == (2, 0)
    stamped = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["commit"] for row in stamped] == [commits[0], commits[1], None, "a" * 40]
    assert not stamped[1]["dirty"]


def test_digest_follows_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = rows.source_digest()
    assert before == rows.source_digest()
    package = tmp_path / "warpline"
    (package / "bench").mkdir(parents=True)
    (package / "bench" / "rows.py").write_text("changed")
    monkeypatch.setattr(rows, "__file__", str(package / "bench" / "rows.py"))
    assert rows.source_digest() != before


def test_profiles_are_not_stale() -> None:
    wanted = profiles.pictures()
    assert {path.name for path in profiles.IMAGES.glob("profile-*.svg")} == set(wanted), "run: make readme"
    for name, text in wanted.items():
        assert (profiles.IMAGES / name).read_text(encoding="utf-8") == text, "run: make readme"


def test_the_story_goes_from_station_to_station(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPUs before CPUs, steps in their order; other methods appear in tables only."""
    monkeypatch.setattr(profiles, "ROOT", tmp_path)
    profiles.sessions.cache_clear()
    assert profiles.story() == profiles.methods() == profiles.verdicts() == profiles.naive_tables() == profiles.NOTHING
    assert profiles.pictures() == {}
    for machine, method, scale in (
        ("cpu", "naive", 9.0),
        ("gpu", "graph", 1.0),
        ("gpu", "naive", 4.0),
        ("gpu", "hf-sdpa", 3.0),
    ):
        dtype = "fp32" if method == "naive" else "fp16"
        (phase,) = made_up(scale=scale).phases
        both = (replace(phase, name="prefill"), phase)
        one = made_up(method=method, dtype=dtype, kind="cpu" if machine == "cpu" else "cuda", phases=both)
        save(one, tmp_path / "results" / machine / "profile" / f"{method}.json")
    profiles.sessions.cache_clear()
    lines = [line for line in profiles.story().splitlines() if line[:1].isdigit()]
    assert [line.split("`")[1] for line in lines] == ["naive", "graph", "naive"]
    assert "4.00× as fast as the previous one" in lines[1]
    assert "`hf-sdpa` fp16" in profiles.methods()
    assert len(profiles.pictures()) == 4
    profiles.sessions.cache_clear()


def test_sessions_get_their_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known, strange = (tmp_path / "results" / "gpu" / "profile" / name for name in ("a.json", "b.json"))
    for path, source in ((known, "s" * 16), (strange, "t" * 16)):
        save(made_up(origin={"commit": None, "dirty": False, "source": source}), path)
    monkeypatch.setattr(profiles, "ROOT", tmp_path)
    monkeypatch.setattr(rows, "_commits", lambda digests: {"s" * 16: "c" * 40} if "s" * 16 in digests else {})
    assert (profiles.stamp(), profiles.stamp()) == (1, 0)
    assert [read(path).origin["commit"] for path in (known, strange)] == ["c" * 40, None]
    profiles.sessions.cache_clear()


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/profile/*.json")), ids=lambda path: path.stem)
def test_sessions_say_where_they_come_from(path: Path) -> None:
    session = read(path)
    assert path.stat().st_size < 300_000
    assert len(session.origin["commit"]) == 40
    assert not session.origin["dirty"]
    assert kept_name(session) == str(path.relative_to(ROOT / "results"))
