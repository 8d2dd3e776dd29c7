"""Small models that every test can afford, and a cache folder of the tests' own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file

from warpline.config import ModelConfig
from warpline.engine.executors import Executor
from warpline.engine.slots import Slots
from warpline.model.gpt2 import GPT2
from warpline.model.weights import Weights, checkpoint, random_tensors

if "PYTEST_XDIST_WORKER" not in os.environ:  # all workers share the folder of the main process
    os.environ["WARPLINE_CACHE_DIR"] = tempfile.mkdtemp(prefix="warpline-test-")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may use the network
# A shell starts background tests with interrupts ignored, which their child processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends more on the machine's load than on the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

SMALL = "random:n_layer=3,n_head=4,n_embd=64,n_positions=96"


def run_alone(arguments: list[str], folder: Path) -> str:
    """Run Python in a process and a folder of its own, without a GPU and without a network; return what it prints."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def make_weights(config: ModelConfig, seed: int = 0, std: float = 0.2) -> Weights:
    """Make weights large enough that logits differ clearly and greedy choices are unambiguous."""
    device = torch.device("cpu")
    return Weights("test", config, random_tensors(config, seed, device=device, dtype=torch.float32, std=std))


def make_model(weights: Weights, *, naive: bool = False) -> GPT2:
    model = GPT2(weights.config, naive=naive)
    model.load_state_dict(weights.tensors)
    return model.requires_grad_(False).eval()


def watch_steps(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of steps of every later call of `decode`."""
    asked: list[int] = []
    decode = executor.decode

    def watched(slots: Slots, lanes: Sequence[int], n: int) -> None:
        asked.append(n)
        decode(slots, lanes, n)

    monkeypatch.setattr(executor, "decode", watched)
    return asked


@pytest.fixture
def slowness() -> float:
    """How many times slower this machine is at present than the one that time limits were made for, which squares half
    a million numbers in 30 ms; at least 1. Shared machines have slow minutes."""

    def seconds() -> float:
        start = time.perf_counter()
        sum(i * i for i in range(500_000))
        return time.perf_counter() - start

    return max(1.0, min(seconds() for _ in range(5)) / 0.03)


@pytest.fixture
def save_folder(tmp_path: Path) -> Callable[[Weights], Path]:
    """Write weights as a Hugging Face folder."""

    def save(weights: Weights) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(weights.config.to_hf()))
        save_file(checkpoint(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return save
