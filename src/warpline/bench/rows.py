"""Rows that can be trusted a year later: what was measured, with what, on what."""

from __future__ import annotations

import datetime
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
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "gpu": gpu,
        "driver": driver_version(),
        "warpline": __version__,
        "torch": torch.__version__,
    }


def _git(*arguments: str) -> str | None:
    """What git says of the source tree, or None where this is no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
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
