"""Compare two results of the same cases and methods: what changed, and whether by more than chance. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpline.bench.report import as_case, key
from warpline.bench.rows import SCHEMA
from warpline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Difference:
    """One method in one case: mean seconds before and after, and the uncertainty of their ratio."""

    case: str
    method: str
    before: float
    after: float
    uncertainty: float  # of the ratio: two standard errors

    @property
    def ratio(self) -> float:
        """Time after over time before: below 1 is faster."""
        return self.after / self.before

    @property
    def verdict(self) -> str:
        """Return "faster", "slower", or "same" where the uncertainty covers the difference."""
        if abs(self.ratio - 1) <= self.uncertainty:
            return "same"
        return "faster" if self.ratio < 1 else "slower"


def read(path: Path) -> list[dict[str, Any]]:
    """Read rows from a JSON lines file or from the output of `--json`; anything else raises a ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        schemas = {row["schema"] for row in rows}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no bench rows: give a file that 'warpline bench --save' wrote") from error
    if any(schema > SCHEMA for schema in schemas):
        raise ConfigError(f"{path} was written by a newer warpline (schema {max(schemas)}, known {SCHEMA}): update")
    return [row for row in rows if row.get("status") == "ok" and "seconds_mean" in row]


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Difference]:
    """Compare the cases and methods that both have, the newest row of each; raise if they have none in common."""
    old = {(key(row), row["method"]): row for row in before}
    new = {(key(row), row["method"]): row for row in after}
    shared = [name for name in new if name in old]
    if not shared:
        raise ConfigError("the two have no case and method in common: there is nothing to compare")
    return [_difference(old[name], new[name]) for name in shared]


def _difference(old: dict[str, Any], new: dict[str, Any]) -> Difference:
    relative = [row["seconds_sigma"] / row["seconds_mean"] / math.sqrt(row["repetitions"]) for row in (old, new)]
    ratio = new["seconds_mean"] / old["seconds_mean"]
    return Difference(
        case=as_case(new).label,
        method=new["method"],
        before=old["seconds_mean"],
        after=new["seconds_mean"],
        uncertainty=2 * ratio * math.hypot(*relative),
    )
