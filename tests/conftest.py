"""Small models that every test can afford, and a cache folder of the tests' own."""

from __future__ import annotations

import json
import os
import signal
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

if "PYTEST_XDIST_WORKER" not in os.environ:  # all workers share the folder of who started them
    os.environ["WARPLINE_CACHE_DIR"] = tempfile.mkdtemp(prefix="warpline-test-")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach out
# Who starts tests in the background has them ignore interrupts, and whatever they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What an example takes says more about the machine's other work than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

SMALL = "random:n_layer=3,n_head=4,n_embd=64,n_positions=96"


def make_weights(config: ModelConfig, seed: int = 0, std: float = 0.2) -> Weights:
    """Weights large enough that logits differ clearly and greedy choices are no coin tosses."""
    device = torch.device("cpu")
    return Weights("test", config, random_tensors(config, seed, device=device, dtype=torch.float32, std=std))


def make_model(weights: Weights, *, naive: bool = False) -> GPT2:
    model = GPT2(weights.config, naive=naive)
    model.load_state_dict(weights.tensors)
    return model.requires_grad_(False).eval()


def watch_steps(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every call of `decode` from now on, how many steps it takes."""
    asked: list[int] = []
    decode = executor.decode

    def watched(slots: Slots, lanes: Sequence[int], n: int) -> None:
        asked.append(n)
        decode(slots, lanes, n)

    monkeypatch.setattr(executor, "decode", watched)
    return asked


@pytest.fixture
def slowness() -> float:
    """How many times longer this machine takes at this moment than the one that bounds in seconds were made for, which
    squares half a million numbers in 30 ms; no less than once. Machines that are shared have slow minutes."""

    def seconds() -> float:
        start = time.perf_counter()
        sum(i * i for i in range(500_000))
        return time.perf_counter() - start

    return max(1.0, min(seconds() for _ in range(5)) / 0.03)


@pytest.fixture
def save_folder(tmp_path: Path) -> Callable[[Weights], Path]:
    """Writes weights as a Hugging Face folder."""

    def save(weights: Weights) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(weights.config.to_hf()))
        save_file(checkpoint(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return save
