"""Every kernel of the catalog on the GPU: every test shape, every dtype, against float64."""

from __future__ import annotations

import pytest
import torch

from warpline.bench.kernels import bench, new_outputs, random_inputs
from warpline.config import DTYPE_BYTES, ROUNDING
from warpline.errors import ConfigError, KernelError
from warpline.kernels import launch, torch_ops
from warpline.kernels.catalog import CATALOG
from warpline.kernels.catalog.rows import LAYERNORM
from warpline.kernels.compile import compile_many
from warpline.kernels.launch import TORCH_TYPES
from warpline.kernels.spec import STORAGE, Buffer, Dims, KernelSpec, Variant

#: Operations in float32 on the way to one result, each with a rounding error; they add up like a random walk.
FLOAT_ERROR = 64 * 2**-24

CASES = [
    pytest.param(spec, dtype, dims, id=f"{spec.name}-{dtype}-{'x'.join(map(str, dims.values()))}")
    for spec in CATALOG.values()
    for dtype in spec.dtypes
    for dims in spec.test_dims
]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All at once, on all cores."""
    arch = launch.arch_of(0)
    cases = [case.values for case in CASES]
    compile_many(list({(Variant.of(spec, dtype, dims, arch), arch) for spec, dtype, dims in cases}))  # type: ignore[arg-type]


def holds_indices(buffer: Buffer) -> bool:
    return not TORCH_TYPES[buffer.element("fp32")].is_floating_point


def is_choice(spec: KernelSpec, buffer: Buffer) -> bool:
    """Whether it holds the index of the largest score; other integers must come out exactly."""
    return holds_indices(buffer) and spec.scores is not None


def with_copies(spec: KernelSpec, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs with copies of those that the op changes, and the copies."""
    pairs = list(zip(spec.inputs, inputs, strict=True))
    given = [tensor.clone() if buffer.role == "updated" else tensor for buffer, tensor in pairs]
    return given, [tensor for buffer, tensor in zip(spec.inputs, given, strict=True) if buffer.role == "updated"]


def exactly(spec: KernelSpec, inputs: list[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
    """The outputs in float64; instead of an index, the scores of which it names the largest."""
    exact = torch_ops.as_floats(inputs, torch.float64)
    numbers = spec.number_values(dims)
    results = list(spec.reference(*exact, **numbers))
    for i, buffer in enumerate(spec.results):
        if is_choice(spec, buffer):
            assert spec.scores is not None
            results[i] = spec.scores(*exact, **numbers)
    return results


def sensitivity(
    spec: KernelSpec, inputs: list[torch.Tensor], dims: Dims, exact: list[torch.Tensor], unit: float
) -> list[torch.Tensor]:
    """How far each result moves when every input moves by half a unit in its last place: a fused op may round an
    intermediate, and LayerNorm of two nearly equal numbers magnifies any rounding by their size over their distance.
    A few draws of signs may miss the worst ones, hence the factor that callers put before it."""
    moved = [largest(values.double() * 0, buffer) for values, buffer in zip(exact, spec.results, strict=True)]
    for _ in range(3):
        nudged = [
            tensor.double() * (1 + unit * (2 * torch.randint_like(tensor, 2).double() - 1))
            if buffer.holds == STORAGE
            else tensor
            for buffer, tensor in zip(spec.inputs, inputs, strict=True)
        ]
        found = zip(exactly(spec, nudged, dims), exact, spec.results, moved, strict=True)
        moved = [torch.maximum(most, largest(a.double() - b.double(), buffer)) for a, b, buffer, most in found]
    return moved


def largest(values: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """The largest finite magnitude: scores of tokens that are out of the question are not. Of scores one for each row,
    since a row of low temperature has scores a thousand times those of its neighbours."""
    finite = values.abs().nan_to_num(0, 0, 0)
    return finite.amax(dim=-1) if holds_indices(buffer) else finite.max()


def check(spec: KernelSpec, dtype: str, dims: Dims, arch: str | None = None) -> list[torch.Tensor]:
    seed = torch.seed() % 2**31
    inputs = random_inputs(spec, dtype, dims, seed)
    numbers = spec.number_values(dims)

    def run() -> list[torch.Tensor]:
        given, copies = with_copies(spec, inputs)
        return launch.run(spec, given, outputs=new_outputs(spec, dtype, dims), arch=arch, numbers=numbers) + copies

    outputs = run()
    exact = exactly(spec, inputs, dims)
    moves = sensitivity(spec, inputs, dims, exact, ROUNDING[dtype])
    for out, reference, moved, buffer in zip(outputs, exact, moves, spec.results, strict=True):
        slack = FLOAT_ERROR + spec.approximation
        if holds_indices(buffer) and not is_choice(spec, buffer):
            assert torch.equal(out, reference), f"seed {seed}"
        elif holds_indices(buffer):
            assert ((out >= 0) & (out < reference.shape[-1])).all(), f"unwritten or out of range (seed {seed})"
            taken = reference.gather(-1, out[:, None])[:, 0]
            bound = slack * largest(reference, buffer) + 4 * moved
            assert (taken >= reference.amax(dim=-1) - bound).all(), f"not the largest (seed {seed})"
        else:
            assert out.isfinite().all(), f"unwritten or not finite (seed {seed})"
            bound = (ROUNDING[dtype] + slack) * largest(reference, buffer) + 4 * moved
            assert (out.double() - reference).abs().max() <= bound, f"seed {seed}"
    assert all(torch.equal(a, b) for a, b in zip(outputs, run(), strict=True)), "two runs differ"
    return outputs


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
    inputs = random_inputs(spec, dtype, dims, 3)
    exact = exactly(spec, inputs, dims)
    default = dict(spec.default(dims, dtype, arch))
    choices = [default | {name: choice} for name, values in spec.tunables.items() for choice in values]
    choices = [tunables for tunables in choices if spec.allows(dims, tunables, dtype)]
    assert len(choices) > len(spec.tunables)
    compile_many([(Variant.of(spec, dtype, dims, arch, tunables), arch) for tunables in choices])
    for tunables in choices:
        given, copies = with_copies(spec, inputs)
        outputs = launch.run(spec, given, outputs=new_outputs(spec, dtype, dims), tunables=tunables) + copies
        for out, reference, buffer in zip(outputs, exact, spec.results, strict=True):
            if holds_indices(buffer) and not is_choice(spec, buffer):
                assert torch.equal(out, reference), tunables
                continue
            if holds_indices(buffer):
                distance = reference.amax(dim=-1) - reference.gather(-1, out[:, None])[:, 0]
            else:
                distance = (out.double() - reference).abs().max()
            assert (distance <= 8 * ROUNDING["fp16"] * largest(reference, buffer)).all(), tunables


@pytest.mark.parametrize("spec", torch_ops.OPERATORS.values(), ids=torch_ops.OPERATORS)
def test_torch_operator(spec: KernelSpec) -> None:
    inputs = random_inputs(spec, "fp16", spec.test_dims[3], 5)
    operator = getattr(torch.ops.warpline, spec.name).default
    torch.library.opcheck(operator, tuple(inputs))
    direct = launch.run(spec, inputs)
    torch._dynamo.reset()  # one piece of code compiled for every spec would reach the limit of its versions
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


def test_bench_rows_are_whole() -> None:
    rows = list(bench([LAYERNORM], ["fp16"]))
    assert len(rows) == len(LAYERNORM.bench_dims)
    for row in rows:
        assert row["gpu"] == torch.cuda.get_device_name()
        assert 0 < row["percent_of_copy"] < 110
        assert row["us_p20"] <= row["us"] <= row["us_p80"]
        assert row["gb_s"] == pytest.approx(LAYERNORM.bytes(row["dims"], "fp16") / row["us"] / 1e3, rel=0.01, abs=0.06)
    assert set(DTYPE_BYTES) >= {row["dtype"] for row in rows}
