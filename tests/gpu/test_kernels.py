"""Every kernel of the catalog on the GPU: every test shape, every dtype, compared with float64."""

from __future__ import annotations

import pytest
import torch

from warpline.bench.kernels import bench
from warpline.config import DTYPE_BYTES
from warpline.errors import ConfigError, KernelError
from warpline.kernels import launch, torch_ops
from warpline.kernels.arguments import Dims
from warpline.kernels.catalog import CATALOG
from warpline.kernels.catalog.rows import LAYERNORM
from warpline.kernels.compile import compile_many
from warpline.kernels.spec import KernelSpec, Variant
from warpline.kernels.verify import Trial, random_inputs

CASES = [
    pytest.param(spec, dtype, dims, id=f"{spec.name}-{dtype}-{'x'.join(map(str, dims.values()))}")
    for spec in CATALOG.values()
    for dtype in spec.dtypes
    for dims in spec.test_dims
]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile all of them at once, on all cores."""
    arch = launch.arch_of(0)
    cases = [case.values for case in CASES]
    compile_many(list({(Variant.of(spec, dtype, dims, arch), arch) for spec, dtype, dims in cases}))  # type: ignore[arg-type]


def check(spec: KernelSpec, dtype: str, dims: Dims, arch: str | None = None) -> None:
    Trial(spec, dtype, dims, torch.seed() % 2**31).check(arch=arch)


@pytest.mark.parametrize(("spec", "dtype", "dims"), CASES)
def test_kernel_against_float64(spec: KernelSpec, dtype: str, dims: Dims) -> None:
    check(spec, dtype, dims)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_turing_path(spec: KernelSpec, dtype: str) -> None:
    """Compiled as PTX for compute_75 and run here."""
    if not spec.runs_on(dtype, "compute_75"):
        pytest.skip(f"{spec.name} has no {dtype} form")
    shapes = spec.test_dims[::4]
    compile_many([(Variant.of(spec, dtype, dims, "compute_75"), "compute_75") for dims in shapes])
    for dims in shapes:
        check(spec, dtype, dims, arch="compute_75")


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_every_tunable_choice_is_correct(spec: KernelSpec) -> None:
    dims, arch, dtype = spec.bench_dims[1], launch.arch_of(0), "fp16" if "fp16" in spec.dtypes else "fp32"
    default = dict(spec.default(dims, dtype, arch))
    choices = [default | {name: choice} for name, values in spec.tunables.items() for choice in values]
    choices = [tunables for tunables in choices if spec.allows(dims, tunables, dtype)]
    assert len(choices) > len(spec.tunables)
    compile_many([(Variant.of(spec, dtype, dims, arch, tunables), arch) for tunables in choices])
    trial = Trial(spec, dtype, dims, 3)
    for tunables in choices:
        trial.check(tunables=tunables)


@pytest.mark.parametrize("spec", torch_ops.OPERATORS.values(), ids=torch_ops.OPERATORS)
def test_torch_operator(spec: KernelSpec) -> None:
    inputs = random_inputs(spec, "fp16", spec.test_dims[3], 5)
    operator = getattr(torch.ops.warpline, spec.name).default
    torch.library.opcheck(operator, tuple(inputs))
    direct = launch.run(spec, inputs)
    torch._dynamo.reset()  # one function compiled for every spec would reach the limit of its versions
    result = torch.compile(lambda *t: operator(*t), fullgraph=True)(*inputs)
    through = list(result) if isinstance(result, tuple) else [result]
    assert all(torch.equal(a, b) for a, b in zip(through, direct, strict=True))


def test_wrong_inputs_are_named() -> None:
    x, w = torch.zeros(4, 8, device="cuda"), torch.zeros(8, device="cuda")
    with pytest.raises(ConfigError, match="weight must be contiguous"):
        launch.run(LAYERNORM, [x, w.half(), w])
    with pytest.raises(ConfigError, match="x must be contiguous"):
        launch.run(LAYERNORM, [torch.zeros(8, 4, device="cuda").T, w, w])
    with pytest.raises(ConfigError, match="on the CPU"):
        launch.run(LAYERNORM, [x.cpu(), w, w])
    with pytest.raises(KernelError, match=r"does not run in torch\.int32"):
        launch.run(LAYERNORM, [x.int(), w.int(), w.int()])
    assert launch.run(LAYERNORM, [x[:0], w, w])[0].shape == (0, 8)


@pytest.mark.alone
def test_bench_rows_are_whole() -> None:
    rows = list(bench([LAYERNORM], ["fp16"]))
    assert len(rows) == len(LAYERNORM.bench_dims)
    for row in rows:
        assert row["gpu"] == torch.cuda.get_device_name()
        assert 0 < row["percent_of_copy"] < 110
        assert row["us_p20"] <= row["us"] <= row["us_p80"]
        assert row["gb_s"] == pytest.approx(LAYERNORM.bytes(row["dims"], "fp16") / row["us"] / 1e3, rel=0.01, abs=0.06)
    assert set(DTYPE_BYTES) >= {row["dtype"] for row in rows}
