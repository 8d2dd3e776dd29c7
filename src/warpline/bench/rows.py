"""Rows that can be trusted a year later: what was measured, with what, on what."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from warpline import __version__
from warpline.errors import ConfigError

SCHEMA = 1


def provenance() -> dict[str, Any]:
    """Commit, GPU, driver, versions and time of this run."""
    import torch

    from warpline.survey import driver_version

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "source": source_digest(),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "gpu": gpu,
        "driver": driver_version(),
        "warpline": __version__,
        "torch": torch.__version__,
    }


def source_digest() -> str:
    """Digest of the package's code: says what was measured even where there is no checkout to ask for a commit."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cuh", ".cu")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def stamp(path: Path) -> int:
    """Fill in the commit of rows measured elsewhere from exactly this clean checkout; return how many."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ours = [row for row in rows if row["commit"] is None and row["source"] == source_digest()]
    if not ours:
        return 0
    commit = _git("rev-parse", "HEAD")
    if commit is None or _git("status", "--porcelain", "--", "src"):
        raise ConfigError("rows can only be stamped in a checkout whose src/ is committed")
    for row in ours:
        row["commit"] = commit
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(ours)


def _git(*arguments: str) -> str | None:
    """What git says of the source tree, or None where this is no checkout."""
    command = ["git", "-C", str(Path(__file__).parents[3]), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def append(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Add rows to results/<gpu>/<name>.jsonl."""
    gpu = rows[0]["gpu"]
    path = folder / re.sub(r"[^a-z0-9]+", "-", str(gpu or "cpu").lower()).strip("-") / f"{name}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path
