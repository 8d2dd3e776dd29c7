"""A small case, and the rows of a small run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import SMALL
from warpline.bench.run import Bench
from warpline.bench.workloads import Case, Settings

CPU = torch.device("cpu")


def case(**changes: Any) -> Case:
    usual: dict[str, Any] = {"workload": "reference", "kind": "generate", "model": SMALL, "dtype": "fp32", "new": 8}
    return Case(**usual | changes)


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    bench = Bench(Settings("cpu", repetitions=3, budget_seconds=5))
    bench.prepare()
    wanted = [case(prompt=p, new=8, workload="decode", kind="decode") for p in (4, 20)]
    wanted += [case(workload="prefill", kind="prefill", prompt=16, new=0), case(prompt=4000)]
    ticks: list[float] = []
    found = list(bench.run(wanted, ["torch", "naive", "static-kv", "static-kv-graph"], ticks.append))
    assert sum(ticks) == 4 * 4
    return [row for case_rows in found for row in case_rows]
