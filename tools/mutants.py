"""Checks whether tests notice errors: operators of the package, drawn with a seed, are swapped, and each swap is tried
with the tests that reach it: `make mutants` (all tests once, to find out which, then up to minutes for each swap).

A swap that no test notices is printed with its place. A failing test counts if it passes without the swap. Code that
runs while a module is imported, or is compiled for a CPU, is reached by no test: there the tests nearest by name run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "warpline"
#: An operator's source, and what replaces it.
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
#: Files that tests do not run on a machine without a GPU, or that have no code of their own.
SKIPPED = ("kernels/cuda", "__init__.py", "__main__.py", "scale/cluster.py", "scale/online.py")
#: Seconds of tests that are tried for a swap: first of the fastest, then of any. A run that takes longer says nothing.
FASTEST, SECONDS, TIMEOUT = 60, 300, 900
#: Kilobytes of memory that a run may allocate: a swap may make a loop that never ends.
MEMORY = 8_000_000
#: Test files nearest by name that are tried for a swap that no test reaches.
MOST_FILES = 8
PYTEST = (sys.executable, "-m", "pytest")
#: Source of a module in the copy of the package: records which test, or process started by it, reaches which swap.
REACHED = """
import os

_known = set()

def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (number, test) not in _known:
        _known.add((number, test))
        with open({path!r}, "a") as file:
            file.write(f"{{number}} {{test}}\\n")
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the text from `start` to `end` of a file becomes `after`."""

    path: str  # below the package
    line: int
    runs: bool  # when a function is called, not when its module is imported or compiled for a CPU
    whole: tuple[int, int]  # begin and end of the expression around it
    start: int
    end: int
    before: str
    after: str

    def applied(self, text: str) -> str:
        """Return the file's text with the change."""
        raw = text.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every change that a file allows. Annotations, decorators and f-strings are left alone."""
    text = path.read_text(encoding="utf-8")
    raw = text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name, compiled = str(path.relative_to(PACKAGE)), _is_compiled(raw)

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def between(whole: ast.expr, left: ast.expr, right: ast.expr, kind: type[ast.AST], runs: bool) -> Iterator[Mutant]:
        assert left.end_lineno is not None
        assert left.end_col_offset is not None
        assert whole.end_lineno is not None
        assert whole.end_col_offset is not None
        extent = at(whole.lineno, whole.col_offset), at(whole.end_lineno, whole.end_col_offset)
        begin, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        found, becomes = SWAPS[kind]
        place = raw[begin:end].find(found.encode())
        if place >= 0:
            start = begin + place
            line = raw[:start].count(b"\n") + 1
            yield Mutant(name, line, runs, extent, start, start + len(found), found, becomes)

    def visit(node: ast.AST, runs: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.AnnAssign) and not getattr(node, "value", None):
            return
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            yield from between(node, node.left, node.right, type(node.op), runs)
        elif isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if type(op) in SWAPS:
                    yield from between(node, left, right, type(op), runs)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(node, left, right, type(node.op), runs)
        inside = runs or (not compiled and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, (inside and field == "body") or runs)

    yield from visit(ast.parse(text), False)


def _is_compiled(source: bytes) -> bool:
    """Whether numba compiles functions of a file: what they do cannot be watched."""
    return b"@njit" in source or b"@intrinsic" in source


def drawn(seed: int, count: int) -> list[Mutant]:
    """Draw `count` changes, in different files as far as possible."""
    rng = random.Random(seed)
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not any(part in str(path) for part in SKIPPED)]
    rng.shuffle(files)
    choices = {path: its for path in files if (its := list(mutants(path)))}
    found: list[Mutant] = []
    while len(found) < count:
        for path in choices:
            one = rng.choice(choices[path])
            if one not in found:
                found.append(one)
            if len(found) == count:
                break
    return found


def nearest(path: str) -> list[str]:
    """Return the test files nearest to a file: those that import its module or share its name come first."""
    parts = Path(path).with_suffix("").parts
    module, stem = ".".join(("warpline", *parts)), parts[-1]
    parent, leaf = module.rpartition(".")[::2]
    ranked: list[tuple[int, str]] = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        if {"gpu", "ray"} & set(test.parts):
            continue
        text = test.read_text(encoding="utf-8")
        imports = f"from {module} import" in text or f"from {parent} import {leaf}" in text or f"{leaf}," in text
        same_name = stem.strip("_") in test.stem
        same_room = len(parts) > 1 and parts[0] == test.parent.name
        part = any(name in test.stem for name in parts[1:-1])
        near = same_name and same_room
        score = 4 * near + 3 * (imports and parent in text) + 3 * part + 2 * same_room + 3 * (same_name and not near)
        if score:
            ranked.append((-score, str(test.relative_to(ROOT))))
    return [name for _, name in sorted(ranked)[:MOST_FILES]] or ["tests/test_house.py"]


def copied(folder: Path) -> Path:
    """Copy the project for a change and return its package. Folders that no change touches are linked."""
    for part in ("src", "tests", "tools", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder / "src" / "warpline"


def watched(package: Path, wanted: Sequence[Mutant], log: Path) -> None:
    """Make every expression with a change record that it was reached. Compiled code cannot do that."""
    (package.parent / "reached.py").write_text(REACHED.format(path=str(log)), encoding="utf-8")
    for path in {mutant.path for mutant in wanted}:
        raw = (package / path).read_bytes()
        if _is_compiled(raw):
            continue
        marks = []
        for number, mutant in enumerate(wanted):
            if mutant.path == path:
                start, end = mutant.whole
                marks += [(start, b'(__import__("reached").hit(%d), ' % number), (end, b")[1]")]
        for place, text in sorted(marks, reverse=True):
            raw = raw[:place] + text + raw[place:]
        (package / path).write_bytes(raw)


def reaching(wanted: Sequence[Mutant]) -> list[list[str]]:
    """Run all tests; return for each change the tests to try: those that reach it, or those of the nearest files."""
    with tempfile.TemporaryDirectory(prefix="reached-") as name:
        folder = Path(name)
        watched(copied(folder), wanted, folder / "log")
        command = ["-q", "-m", "not alone", "-n", "logical", "--timeout", "300", "-o", "junit_family=xunit1"]
        subprocess.run(
            [*PYTEST, *command, "--junitxml", "times.xml"], cwd=folder, env=_environment(folder), check=False
        )
        seconds: dict[str, float] = defaultdict(float)
        for case in ElementTree.parse(folder / "times.xml").iter("testcase"):
            seconds[f"{case.get('file')}::{case.get('name')}"] += float(case.get("time", 0))
        found: list[set[str]] = [set() for _ in wanted]
        for line in (folder / "log").read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition(" ")
            found[int(number)].add(test)
    return [chosen(mutant, tests, seconds) for mutant, tests in zip(wanted, found, strict=True)]


def chosen(mutant: Mutant, tests: set[str], seconds: Mapping[str, float]) -> list[str]:
    """Return which of these tests to try, in order, given their seconds. The fastest are often alike, so some follow
    that are drawn from the others. What runs when no test does is for the nearest files."""
    fastest = sorted(tests, key=lambda test: (seconds[test], test))
    totals = accumulate(map(seconds.__getitem__, fastest))
    first = [test for test, total in zip(fastest, totals, strict=True) if total < FASTEST]
    rest = fastest[len(first) :]
    random.Random(mutant.start).shuffle(rest)
    totals = accumulate(map(seconds.__getitem__, rest))
    more = [test for test, total in zip(rest, totals, strict=True) if total < SECONDS - FASTEST]
    return first + (more or rest[:1]) if mutant.runs else nearest(mutant.path)


def is_noticed(mutant: Mutant, tests: list[str]) -> tuple[bool, float]:
    """Return whether a test fails in a changed copy that passes without the change, and the seconds that took."""
    if not tests:
        return False, 0.0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        target = copied(copy) / mutant.path
        target.write_text(mutant.applied(target.read_text(encoding="utf-8")), encoding="utf-8")
        failed = _failing(copy, tests)
    return failed is not None and _failing(ROOT, failed) is None, time.monotonic() - begun


def _failing(root: Path, tests: list[str]) -> list[str] | None:
    """Return the first failing test in a list; None if there is none, or if they took too long to say."""
    limited = ("sh", "-c", f'ulimit -d {MEMORY} && exec "$@"', "pytest")
    command = [*limited, *PYTEST, "-x", "-q", "-p", "no:cacheprovider", "--timeout", "200", "-m", "not alone"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=root, env=_environment(root), capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if not done.returncode:
        return None
    named = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return named[:1] or tests


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reached", type=Path, help="a file for what tests reach; not found out again if it is there")
    parser.add_argument("--out", type=Path, help="write what was found as JSON lines")
    asked = parser.parse_args(arguments)
    wanted = drawn(asked.seed, asked.count)
    if asked.reached is not None and asked.reached.exists():
        tests = json.loads(asked.reached.read_text(encoding="utf-8"))
    else:
        tests = reaching(wanted)
        if asked.reached is not None:
            asked.reached.write_text(json.dumps(tests), encoding="utf-8")
    rows = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutant, its, (noticed, seconds) in zip(wanted, tests, pool.map(is_noticed, wanted, tests), strict=True):
            rows.append({**asdict(mutant), "tests": len(its), "noticed": noticed, "seconds": round(seconds, 1)})
            what = f"{mutant.path}:{mutant.line}  {mutant.before} → {mutant.after}"
            result = "noticed " if noticed else "SURVIVED" if its else "untested"
            print(f"{result}  {seconds:4.0f} s  {len(its):4} tests  {what}", flush=True)
            if asked.out is not None:
                asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reached = [row for row in rows if row["tests"]]
    killed = sum(row["noticed"] for row in reached)
    print(
        f"\n{killed} of {len(reached)} changes were noticed ({100 * killed / len(reached):.0f} %), seed {asked.seed}; "
        f"{len(rows) - len(reached)} are reached by no test here, such as code for a GPU"
    )


if __name__ == "__main__":
    main()
