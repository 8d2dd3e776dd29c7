"""Measures a method in a process of its own: how long until its first token, and how much memory it takes.

Run as a program, this module is that process: it builds the method of a case, generates, and prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpline.bench.methods.names import OURS
from warpline.hardware import wake_gpu

if TYPE_CHECKING:
    import torch

    from warpline.bench.workloads import Case

TIMEOUT_SECONDS = 600

logger = logging.getLogger(__name__)


def measure_process(name: str, case: Case, device: torch.device) -> dict[str, Any]:
    """Return the row of a coldstart or memory case."""
    job = json.dumps({"method": name, "case": asdict(case), "device": str(device)})
    bytecode = _has_bytecode() if case.kind == "coldstart" else None  # before the first start can leave some
    try:
        with tempfile.TemporaryDirectory(prefix="warpline-cold-") as cache:
            cold = _start(job, cache)
            if case.kind == "memory":
                return {"status": "ok", "peak_bytes": cold["peak_bytes"]}
            warm = _start(job, cache)
    except _Failed as failure:
        return {"status": "failed", "why": str(failure)}
    found = {"cold_seconds": cold["seconds"], "warm_seconds": warm["seconds"]}
    return {"status": "ok", **found, "bytecode": bytecode}


def _has_bytecode() -> bool:
    """Return whether Python finds torch compiled, as an installation leaves it. If not, every start compiles it again,
    which may take longer than everything else."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin and Path(importlib.util.cache_from_source(torch.origin)).exists():
        return True
    logger.warning(
        "Python finds no bytecode of torch and compiles it at every start: unset PYTHONDONTWRITEBYTECODE, or set "
        "PYTHONPYCACHEPREFIX to a folder that can be written"
    )
    return False


class _Failed(Exception):
    """A process did not answer; the message says why."""


def _start(job: str, cache: str) -> dict[str, Any]:
    """Return what a new process answers, and the seconds from its start to its first token."""
    environment = os.environ | {"WARPLINE_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    command = [sys.executable, "-m", "warpline.bench.process", job]
    start = time.time()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise _Failed(f"no token within {TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        raise _Failed((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"seconds": round(answer["first_token_at"] - start, 3)}


def main(job: str) -> None:
    """Run the job, given as JSON, and write the answer to stdout."""
    asked = json.loads(job)
    if asked["method"] in OURS:  # as `warpline generate` does
        wake_gpu(asked["device"])

    import torch

    from warpline.bench import methods
    from warpline.bench.workloads import Case
    from warpline.model.weights import load

    asked_for, device = Case(**asked["case"]), torch.device(asked["device"])
    case = replace(asked_for, new=max(2, asked_for.new))
    kind = methods.find(asked["method"])
    kind.start_compiling(case, device)
    weights = load(case.model, dtype=kind.stored or case.dtype, device=str(device))
    method = kind(weights, case, device)
    prompts = torch.arange(case.prompt).repeat(case.batch, 1).to(device) % weights.config.vocab_size
    ids = method.ids(prompts)
    method.answer(ids, 1)
    first = time.time()
    method.answer(ids, case.new)  # for the peak, and so that all caches for the next start are filled
    sys.stdout.write(json.dumps({"first_token_at": first, "peak_bytes": method.peak_bytes()}) + "\n")
    method.close()


if __name__ == "__main__":
    main(sys.argv[1])
