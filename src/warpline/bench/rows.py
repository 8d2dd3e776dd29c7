"""Rows with their provenance: what was measured, with which code and versions, on which machine."""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from warpline import __version__, hardware
from warpline.errors import ConfigError, WarplineError

SCHEMA = 1
#: Errors of a method that do not end the run: its row reports them.
FAILURES = (RuntimeError, ImportError, ValueError, TypeError, WarplineError)


def failed(error: Exception) -> dict[str, Any]:
    """Return the status of a method's row after this error."""
    lines = str(error).splitlines() or [""]
    if isinstance(error, ConfigError):  # refused by a check, not broken
        return {"status": "impossible", "why": lines[0][:200]}
    return {"status": "failed", "why": f"{type(error).__name__}: {lines[0][:200]}"}


def provenance() -> dict[str, Any]:
    """Return commit, GPU, driver, versions and time of this run."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "source": source_digest(),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "gpu": gpu,
        "driver": hardware.driver_version(),
        "warpline": __version__,
        "torch": torch.__version__,
    }


def source_digest() -> str:
    """Return a digest of the package's code: it identifies what was measured even where that was not committed."""
    root = Path(__file__).parents[1]
    return _digest({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()})


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted((name for name in files if name.endswith((".py", ".cuh", ".cu"))), key=Path):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()[:16]


def stamp(path: Path) -> int:
    """Give rows measured from uncommitted code the commit that has exactly this code; return how many were changed.

    A row whose code is in no commit of this history stays as it is.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    waiting = [row for row in rows if row["commit"] is None or row.get("dirty")]
    commits = _commits({row["source"] for row in waiting})
    found = [row for row in waiting if row["source"] in commits]
    for row in found:
        row |= {"commit": commits[row["source"]], "dirty": False}
    if found:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(found)


def _commits(digests: set[str]) -> dict[str, str]:
    """Return the newest commit for each digest, searched in the last hundred commits that changed the package."""
    found: dict[str, str] = {}
    package = f"src/{Path(__file__).parents[1].name}"
    history = _git("rev-list", "--max-count=100", "HEAD", "--", package) if digests else None
    for commit in (history or "").split():
        with tarfile.open(fileobj=io.BytesIO(_run("archive", commit, package))) as archive:
            files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
            digest = _digest({name.removeprefix(f"{package}/"): file.read() for name, file in files.items() if file})
        found.setdefault(digest, commit)
        if digests <= found.keys():
            break
    return found


def _git(*arguments: str) -> str | None:
    """Return what git prints for the source tree, or None where this is no checkout."""
    try:
        return _run(*arguments).decode().strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def _run(*arguments: str) -> bytes:
    command = ["git", "-C", str(Path(__file__).parents[3]), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


def append(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Append rows to results/<gpu>/<name>.jsonl; return the path."""
    gpu = rows[0]["gpu"]
    path = folder / re.sub(r"[^a-z0-9]+", "-", str(gpu or "cpu").lower()).strip("-") / f"{name}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path
