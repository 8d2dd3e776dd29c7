"""Which tests reach which lines of the package, in their own process and in those they start: recorded by coverage
while pytest runs with `-p tools.reached`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Where the times of tests are written, for the process that hears of all of them.
TIMES = "WARPLINE_TIMES_OF_TESTS"
#: A process that a test starts belongs to that test: pytest says which one that is.
SETTINGS = """\
[run]
source = {package}
data_file = {data}
parallel = true
patch = subprocess, _exit
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported
"""

_times: dict[str, float] = defaultdict(float)


@dataclass(frozen=True)
class Reached:
    """Tests by the line they reach, and the seconds each takes."""

    lines: dict[str, dict[int, set[str]]]  # by the file's name below the package
    seconds: dict[str, float] = field(default_factory=dict)

    def tests(self, path: str, line: int) -> list[str]:
        """Fastest first. None for a line that only runs while its module is imported, or that is compiled."""
        return sorted(self.lines.get(path, {}).get(line, ()), key=lambda test: self.seconds.get(test, 0))


def record(folder: Path) -> None:
    """Run the tests that can run side by side, and leave what they reached in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(package=ROOT / "src" / "warpline", data=folder / "data"), encoding="utf-8")
    coverage = [sys.executable, "-m", "coverage"]
    pytest_too = ["pytest", "-q", "-p", "tools.reached", "-m", "not alone", "-n", "logical", "--timeout", "600"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", TIMES: str(folder / "seconds.json")}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    subprocess.run(
        [*coverage, "run", f"--rcfile={settings}", "-m", *pytest_too], cwd=ROOT, env=environment, check=False
    )
    subprocess.run([*coverage, "combine", "-q", f"--rcfile={settings}"], cwd=ROOT, check=True)


def read(folder: Path) -> Reached:
    """What `record` left there."""
    from coverage import CoverageData

    data = CoverageData(str(folder / "data"))
    data.read()
    lines: dict[str, dict[int, set[str]]] = {}
    for name in data.measured_files():
        path = str(Path(name).relative_to(ROOT / "src" / "warpline"))
        for line, contexts in data.contexts_by_lineno(name).items():
            found = {re.sub(r" \((setup|call|teardown)\)$", "", context) for context in contexts}
            lines.setdefault(path, {})[line] = {test for test in found if "::" in test}
    return Reached(lines, json.loads((folder / "seconds.json").read_text(encoding="utf-8")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What runs from now on is this test's."""
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        if current is not None:
            current.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _times[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if TIMES in os.environ and not hasattr(session.config, "workerinput"):
        Path(os.environ[TIMES]).write_text(json.dumps(_times), encoding="utf-8")
