"""The examples of CONTRIBUTING.md hold: the op compiles and is right, the executor writes torch's tokens."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tools.readme import ROOT
from warpline import LLM, SamplingParams
from warpline.engine.executors import EXECUTORS
from warpline.kernels import compile as compiler
from warpline.kernels.catalog import CATALOG
from warpline.kernels.compile import compile_one
from warpline.kernels.spec import KernelSpec, Variant
from warpline.kernels.verify import random_inputs

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(path: str) -> str:
    """The code whose first line names a file."""
    (found,) = re.findall(rf"^```\w+\n(?://|#) {re.escape(path)}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


def module(name: str, path: str) -> types.ModuleType:
    made = types.ModuleType(name)
    exec(compile(block(path), path, "exec"), made.__dict__)
    return made


@pytest.fixture
def op() -> KernelSpec:
    spec = module("contributed", "src/warpline/kernels/catalog/rows.py").SCALE_ROWS
    assert isinstance(spec, KernelSpec)
    assert spec.name not in CATALOG
    return spec


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_op_compiles(op: KernelSpec, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "cuda"
    shutil.copytree(compiler.SOURCE, source)
    (source / op.header).write_text(block(f"src/warpline/kernels/cuda/{op.header}"))
    monkeypatch.setattr(compiler, "SOURCE", source)
    for dims in (*op.test_dims, op.bench_dims[0]):
        report = compile_one(Variant.of(op, dtype, dims, "sm_80"), "sm_80").report
        assert report.spill_bytes == 0


def test_the_op_is_what_its_spec_says(op: KernelSpec) -> None:
    for dims in op.test_dims:
        x, factor = random_inputs(op, "fp32", dims, 0, device="cpu")
        (y,) = op.reference(x, factor)
        assert np.array_equal(y.numpy(), x.numpy() * factor.numpy()[:, None])
        assert op.bytes(dims, "fp32") == 4 * (2 * x.numel() + factor.numel())
        launch = Variant.of(op, "fp32", dims, "sm_80").launch(dims)
        assert 0 <= launch.grid * launch.block - x.numel() < launch.block


def test_the_executor_writes_torchs_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("contributed_whole", "src/warpline/engine/executors/whole.py")
    assert '"whole": "warpline.engine.executors.whole:WholeExecutor"' in TEXT
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(EXECUTORS, "whole", f"{made.__name__}:WholeExecutor")
    found = []
    for executor in ("whole", "torch"):
        llm = LLM("stories", device="cpu", dtype="fp32", executor=executor, max_batch=2)
        settings = [SamplingParams(max_tokens=10, temperature=0), SamplingParams(max_tokens=7, seed=1, n=2)]
        texts = llm.generate(["Once upon a time", "The sun was"], settings)
        found.append([completion.token_ids for completion in texts])
        llm.close()
    assert found[0] == found[1]
    assert [len(ids) for ids in found[0]] == [10, 7, 7]
