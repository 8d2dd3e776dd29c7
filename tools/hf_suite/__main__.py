"""Runs transformers' own model tests on GPT-2 twice: as it is, and with every model patched. Exits with 1 if a test
ends worse on patched models, or if none was patched.

    python -m tools.hf_suite FOLDER    # the tests folder of a source distribution or a checkout
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

#: Outcomes of a test, from good to bad.
OUTCOMES = ("passed", "skipped", "failed")


class Record(unittest.TestResult):
    """The worst outcome of each test, with its message."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, tuple[str, str]] = {}

    def _note(self, test: unittest.TestCase, outcome: str, said: str = "") -> None:
        name = test.id().rpartition(".")[2]
        before = self.outcomes.get(name, ("passed", ""))
        self.outcomes[name] = max(before, (outcome, said), key=lambda one: OUTCOMES.index(one[0]))

    def startTest(self, test: unittest.TestCase) -> None:
        """Seed all generators, so that both runs of a test have the same random numbers."""
        import numpy as np
        import torch

        super().startTest(test)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(getattr(test, "test_case", test), "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "failed", _text(err))

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._note(test, "failed", f"{subtest}\n{_text(err)}")


def _text(error: tuple[Any, ...]) -> str:
    return "".join(traceback.format_exception(*error))


def run(folder: Path, patched: bool, names: list[str]) -> dict[str, Any]:
    """Run all tests in this process; return the outcomes, the counts, and what the folder lacks."""
    from tools.hf_suite import gpt2, hooks, loading

    stand_ins = loading.load(folder)
    case = gpt2.case()
    patching = hooks.Patching()
    if patched:
        patching.put()
    record = Record()
    for name in names or unittest.TestLoader().getTestCaseNames(case):
        case(name).run(record)
        outcome, said = record.outcomes[name]
        print(f"{outcome:8}{name}" + (f"\n{said}" if outcome == "failed" else ""), flush=True)
    return {"outcomes": record.outcomes, "counts": patching.counts, "absent": stand_ins.used}


def in_process(folder: Path, patched: bool, names: list[str]) -> dict[str, Any]:
    """Run the tests in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        result, log = Path(temporary, "result.json"), Path(temporary, "log")
        command = [sys.executable, "-m", "tools.hf_suite", str(folder), *names, "--into", str(result)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with log.open("w") as file:
            subprocess.run(
                [*command, "--patched"] if patched else command, stdout=file, stderr=file, check=False, env=environment
            )
        if not result.exists():
            raise SystemExit(f"the run on {'patched' if patched else 'plain'} models broke:\n{log.read_text()}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def compare(plain: dict[str, Any], patched: dict[str, Any]) -> int:
    """Print what differs; return the exit status."""
    from tools.hf_suite.hooks import PATCHED

    before, after = plain["outcomes"], patched["outcomes"]
    for title, outcomes in (("as it is", before), ("patched", after)):
        counts = Counter(outcome for outcome, _ in outcomes.values())
        print(f"{title:9} " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    for what, count in sorted(patched["counts"].items()):
        print(f"{count:9,} {what}")
    if plain["absent"]:
        print(f"not in this folder, so not run: the tests of {', '.join(plain['absent'])}")
    worse = 0
    for name in sorted(before.keys() | after.keys()):
        (was, _), (now, said) = before.get(name, ("missing", "")), after.get(name, ("missing", ""))
        if was != now:
            print(f"differs: {name}: {was} as it is, {now} patched\n{said}")
            worse += now != "passed"
        elif was == "failed":
            print(f"failed both ways: {name}: {before[name][1].strip().splitlines()[-1]}")
    if not patched["counts"].get(PATCHED):
        print("no model was patched")
    return int(worse > 0 or not patched["counts"].get(PATCHED))


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tools.hf_suite", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="tests to run, all by default")
    parser.add_argument("--patched", action="store_true", help="with --into: patch every model")
    parser.add_argument("--into", type=Path, help="one run only, its outcomes into this file")
    given = parser.parse_args()
    if given.into is not None:
        given.into.write_text(json.dumps(run(given.folder, given.patched, given.names)))
        return 0
    plain, patched = (in_process(given.folder, one, given.names) for one in (False, True))
    return compare(plain, patched)


if __name__ == "__main__":
    sys.exit(main())
