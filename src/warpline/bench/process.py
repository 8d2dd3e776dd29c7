"""A method in a process of its own: how long until its first token, and how much memory it takes.

Run as a program it is that process: it builds the method of a case, generates, and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from warpline.bench.workloads import Case

TIMEOUT_SECONDS = 600


def measure_process(name: str, case: Case, device: torch.device) -> dict[str, Any]:
    """The row of a coldstart or memory case."""
    job = json.dumps({"method": name, "case": asdict(case), "device": str(device)})
    with tempfile.TemporaryDirectory(prefix="warpline-cold-") as cache:
        cold, answer = _start(job, cache)
        if answer is None:
            return {"status": "failed", "why": cold}
        if case.kind == "memory":
            return {"status": "ok", "peak_bytes": answer["peak_bytes"]}
        warm, again = _start(job, cache)
        if again is None:
            return {"status": "failed", "why": warm}
    return {"status": "ok", "cold_seconds": round(float(cold), 3), "warm_seconds": round(float(warm), 3)}


def _start(job: str, cache: str) -> tuple[Any, dict[str, Any] | None]:
    """Seconds from the start of a process to its first token and what it said; or why it failed, and None."""
    environment = os.environ | {"WARPLINE_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "warpline.bench.process", job],
        capture_output=True,
        text=True,
        env=environment,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[-1][:200], None
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["first_token_at"] - start, answer


def main(job: str) -> None:
    """Be the process."""
    asked = json.loads(job)

    import torch

    from warpline.bench import methods
    from warpline.bench.workloads import Case
    from warpline.model.weights import load

    case, device = Case(**asked["case"]), torch.device(asked["device"])
    weights = load(case.model, dtype=case.dtype, device=str(device))
    method = methods.find(asked["method"])(weights, case, device)
    prompts = torch.arange(case.prompt).repeat(case.batch, 1).to(device) % weights.config.vocab_size
    method.generate(prompts, 1).cpu()
    first = time.time()
    if case.kind == "memory":
        method.generate(prompts, case.new).cpu()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"first_token_at": first, "peak_bytes": peak}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
