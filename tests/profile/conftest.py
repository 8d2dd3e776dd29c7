"""Sessions made up so that the answer is known, and a recorded one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import SMALL
from warpline.config import ModelConfig
from warpline.kernels.persistent import LAYER_STAMPS, TOKEN_STAMPS
from warpline.profile.names import stamp_path
from warpline.profile.session import KernelRow, Launches, ModulePath, Moment, Phase, Session, SpanRow, Work

GPT2 = ModelConfig()


def stages(layers: int) -> list[ModulePath]:
    """Modules of the persistent kernel's moments."""
    return [stamp_path(m, i) for i in range(layers) for m in LAYER_STAMPS] + [stamp_path(m, None) for m in TOKEN_STAMPS]


#: µs per layer and per step of a made-up GPU, computing only.
BLOCK: dict[ModulePath, float] = {
    ("ln_1",): 2,
    ("attention", "QKV projection"): 5,
    ("attention", "QKV reshape"): 1,
    ("attention", "KV cache"): 1,
    ("attention", "fused attention"): 4,
    ("attention", "output reshape"): 1,
    ("attention", "output projection"): 2,
    ("residual 1",): 1,
    ("ln_2",): 2,
    ("MLP", "expansion"): 6,
    ("MLP", "activation"): 1,
    ("MLP", "projection"): 6,
    ("residual 2",): 1,
}
MODEL: dict[ModulePath, float] = {("embedding",): 1, ("position",): 1, ("add",): 1, ("ln_f",): 2, ("LM head",): 40}


def made_up(
    *,
    kind: str = "cuda",
    dtype: str = "fp16",
    gap: float = 0.0,
    change: dict[ModulePath, float] | None = None,
    work: Work | None = None,
    name: str = "decode",
    source: str = "kineto",
    read_gb_s: float = 4000.0,
    tflop_s: float = 600.0,
    scale: float = 1.0,
    **more: Any,
) -> Session:
    """Return a step of gpt2 with the module times above, each after a wait of `gap` µs."""
    block = BLOCK | {k: v for k, v in (change or {}).items() if k in BLOCK or k[0] in ("attention", "MLP")}
    model = MODEL | {k: v for k, v in (change or {}).items() if k in MODEL}
    times = {(f"h.{layer}", *path): us for layer in range(GPT2.n_layer) for path, us in block.items()} | model
    spans = tuple(SpanRow(path, scale * us, gap) for path, us in times.items() if us)
    kernels = tuple(KernelRow(_kernel(path), path, 1.0, scale * us, scale * us) for path, us in times.items() if us)
    step = sum(row.us for row in spans)
    phase = Phase(
        name=name,
        source=source,
        steps=8,
        step_us=step,
        fastest_us=step,
        slowest_us=step,
        plain_us=step,
        work=work or Work(1, 128, 1, naive=False),
        spans=spans,
        kernels=kernels,
        launches=Launches(len(spans), 3.0 * len(spans), 0, len(spans)),
        timeline=(
            Moment("step", "step 1", (), 0.0, 400.0),
            *(Moment("gpu", _kernel(row.path), row.path, 10.0 * i, row.busy_us) for i, row in enumerate(spans[:40])),
        ),
    )
    head: dict[str, Any] = {
        "origin": {"device": "Imaginary 1", "gpu": "Imaginary 1", "torch": "2.0", "time": "2026-01-01", "commit": None},
        "kind": kind,
        "method": "torch",
        "title": "a method",
        "model": "random:gpt2",
        "config": GPT2,
        "dtype": dtype,
        "batch": 1,
        "context": 128,
        "read_gb_s": read_gb_s,
        "product_tflop_s": tflop_s,
        "phases": (phase,),
    }
    return Session(**head | more)


def _kernel(path: ModulePath) -> str:
    last = path[-1]
    if "rojection" in last or last in ("expansion", "LM head", "scores", "values"):
        return "sm90_xmma_gemm_f16f16_tilesize64"
    if "attention" in last:
        return "flash_fwd_kernel"
    if last.startswith("ln") or last == "softmax":
        return "vectorized_layer_norm_kernel"
    return "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor>"


@pytest.fixture(scope="session")
def recorded() -> Session:
    """Record the naive model in a real run."""
    from warpline.profile.collect import ProfileRequest, collect

    return collect(ProfileRequest(method="naive", model=SMALL, dtype="fp32", device="cpu", context=12, steps=4))
