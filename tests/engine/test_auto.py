"""`auto` where the persistent executor cannot run; the kernels executor, which runs anywhere, replaces graph."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.conftest import SMALL
from tests.engine.running import run
from warpline.config import EngineConfig, ModelConfig, SamplingParams
from warpline.engine.executors import auto, create, resolve
from warpline.engine.executors.graph.kernels import KernelsExecutor
from warpline.engine.request import Request
from warpline.errors import ConfigError, KernelError
from warpline.kernels import compile as compiler
from warpline.kernels import launch
from warpline.model.weights import load

CPU = torch.device("cpu")


class Graph(KernelsExecutor):
    name = "graph"


class Persistent(KernelsExecutor):
    """Fails when it is made, when it is compiled, or not at all."""

    name = "persistent"
    most_lanes = 2
    made: Exception | None = None
    compiled: Exception | None = None

    def __init__(self, *arguments: Any, prompts: object):
        if self.made is not None:
            raise self.made
        super().__init__(*arguments)

    def compile_ahead(self, _slots: object, _lanes: object) -> None:
        assert self.made is None

    def prepare(self, _slots: object, _lanes: object) -> None:
        if self.compiled is not None:
            raise self.compiled


@pytest.mark.parametrize(
    ("made", "compiled", "batch", "used", "level"),
    [
        (None, None, 2, "persistent", None),
        (None, None, 3, "graph", None),
        (ConfigError("heads of an odd width"), None, 1, "graph", logging.INFO),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), None, 1, "graph", logging.WARNING),
        (None, KernelError("too little shared memory\nnote"), 1, "graph", logging.WARNING),
        (None, torch.OutOfMemoryError("CUDA out of memory.\nTried"), 2, "graph", logging.WARNING),
    ],
)
def test_auto_goes_on_with_the_graph_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    made: Exception | None,
    compiled: Exception | None,
    batch: int,
    used: str,
    level: int | None,
) -> None:
    monkeypatch.setattr(auto, "GraphExecutor", Graph)
    monkeypatch.setattr(auto, "PersistentExecutor", Persistent)
    monkeypatch.setattr(Persistent, "made", made)
    monkeypatch.setattr(Persistent, "compiled", compiled)
    weights = load(SMALL)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = [Request([5, 6 + i], params, 0, i, 8) for i in range(batch)]
    written = []
    with caplog.at_level(logging.INFO, logger="warpline.engine.executors.auto"):
        for name in ("auto", "torch"):
            executor = create(name, weights, CPU, "fp32")
            written.append(run(executor, requests))
            if name == "auto":
                assert executor.described == f"auto ({used})"
                assert executor.has_tape is (made is None)
    assert written[0] == written[1]
    reasons = [record for record in caplog.records if record.getMessage().startswith("executor auto → graph")]
    assert [record.levelno for record in reasons] == ([level] if level else [])
    assert all("\n" not in record.getMessage() for record in reasons)


@pytest.mark.parametrize(
    ("most", "batch", "compiled", "used"),
    [
        (None, 1, None, "graph"),  # more could join
        (3, 1, None, "graph"),
        (2, 1, None, "persistent"),
        (2, 2, None, "persistent"),
        (1, 1, KernelError("too little shared memory"), None),
    ],
)
def test_one_of_them_decodes_everything_where_bits_may_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, most: int | None, batch: int, compiled: Exception | None, used: str | None
) -> None:
    monkeypatch.setattr(auto, "GraphExecutor", Graph)
    monkeypatch.setattr(auto, "PersistentExecutor", Persistent)
    monkeypatch.setattr(Persistent, "compiled", compiled)
    asked = EngineConfig(deterministic="batch", max_batch=most)
    executor = create("auto", load(SMALL), CPU, "fp32", asked)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = [Request([5, 6 + i], params, 0, i, 8) for i in range(batch)]
    if used is None:
        with pytest.raises(KernelError, match="shared memory"):  # another executor would have other bits
            run(executor, requests)
    else:
        run(executor, requests)
        assert executor.described == f"auto ({used})"


@pytest.mark.parametrize(
    ("arch", "nvrtc", "config", "reason"),
    [
        ("sm_90", "13.0", {}, None),
        ("sm_75", "12.8", {}, None),
        ("sm_70", "12.8", {}, "not made for sm_70"),
        ("sm_90", None, {}, "pip install"),
        ("sm_90", "13.0", {"activation_function": "relu"}, "relu"),
        ("sm_86", "13.0", {"n_head": 2}, "shared memory"),
    ],
)
def test_where_only_torch_runs(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arch: str,
    nvrtc: str | None,
    config: dict[str, Any],
    reason: str | None,
) -> None:
    def version() -> str:
        if nvrtc is None:
            raise KernelError("compiling kernels needs NVRTC: pip install 'warpline[cuda]'")
        return nvrtc

    monkeypatch.setattr(launch, "arch_of", lambda _index: arch)
    monkeypatch.setattr(compiler, "nvrtc_version", version)
    with caplog.at_level(logging.INFO, logger="warpline.engine.executors"):
        chosen = resolve("auto", torch.device("cuda:0"), ModelConfig(**config), "fp16")
    assert chosen == ("auto" if reason is None else "torch")
    assert reason is None or reason in caplog.text
    assert [record.levelno for record in caplog.records] == ([] if reason is None else [logging.WARNING])
    assert resolve("graph", torch.device("cuda:0"), ModelConfig(**config), "fp16") == "graph"
