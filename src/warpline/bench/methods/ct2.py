"""CTranslate2, a C++ engine for transformers, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpline.bench.methods.base import Converted, Method
from warpline.bench.workloads import Case
from warpline.model.export import export
from warpline.model.weights import Weights

#: The transformers checkpoint; conversions are stored beside it.
_exported = Converted(lambda weights, folder: export(weights, folder / "hf"))
#: The libraries that multiply matrices, MKL or oneDNN. The faster one depends on the CPU, so both are tried.
_LIBRARIES = ({"CT2_USE_MKL": "1"}, {"CT2_USE_MKL": "0"})


class _Worker:
    """The worker process; it answers one question at a time."""

    def __init__(self, folder: Path, quantization: str, setting: dict[str, str]):
        command = [sys.executable, "-m", "warpline.bench.methods.ct2_worker", str(folder), quantization]
        self._process = subprocess.Popen(
            [*command, str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | setting,
        )
        self._hear()

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"CTranslate2's process ended with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


class CTranslate2(Method):
    """CTranslate2 in the precision of the case."""

    title = "CTranslate2"
    devices = ("cpu",)
    dtypes = ("fp32",)
    packages = ("ctranslate2", "transformers")
    quantization = "float32"
    startup_seconds = 3.0
    serves = "padded"
    ragged = True  # it pads by itself

    def __init__(self, weights: Weights, case: Case, device: torch.device):
        super().__init__(weights, case, device)
        folder = _exported.folder(weights)
        target = folder / self.quantization
        if not target.exists():
            _convert(folder / "hf", target, self.quantization)
        self._tokenizer = weights.tokenizer()
        self._worker = _fastest([_Worker(target, self.quantization, setting) for setting in _LIBRARIES])

    def generate(self, prompts: Tensor | Sequence[Sequence[int]], new: int) -> Tensor:
        """Generate greedily to the full length."""
        rows = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        texts = [[self._tokenizer.piece(i) for i in row] for row in rows]
        return torch.tensor(self._worker.ask({"prompts": texts, "new": new}))

    def peak_bytes(self) -> int:
        """Return the peak memory of the worker process."""
        return int(self._worker.ask({}))

    def close(self) -> None:
        """Release the weights and end the process."""
        super().close()
        self._worker.close()


class CTranslate2Int8(CTranslate2):
    """CTranslate2 with int8 weights. Its tokens may differ from the others'; the row says how many agree."""

    title = "CTranslate2, int8 weights"
    quantization = "int8"
    exact = False


def _convert(source: Path, target: Path, quantization: str) -> None:
    """Convert in a process of its own, so that this one never loads the library."""
    made = f"ctranslate2.converters.TransformersConverter({str(source)!r})"
    script = f"import ctranslate2; {made}.convert({str(target)!r}, quantization={quantization!r})"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["CTranslate2 could not convert the model"])[-1])


def _fastest(workers: list[_Worker]) -> _Worker:
    """Return the worker that generates a few tokens fastest, measured alternately several times; close the others."""
    times = []
    for turn in range(4 * len(workers)):
        start = time.perf_counter()
        workers[turn % len(workers)].ask({"prompts": [["a"] * 16], "new": 8})
        times.append((time.perf_counter() - start, turn % len(workers)))
    best = workers[min(times)[1]]
    for worker in workers:
        if worker is not best:
            worker.close()
    return best
