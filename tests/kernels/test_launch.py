"""What a launch checks before it needs a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from warpline.errors import ConfigError, KernelError
from warpline.hardware import ARCH_LIMITS
from warpline.kernels import compile as compiler
from warpline.kernels import launch
from warpline.kernels.arguments import Scalar
from warpline.kernels.catalog import CATALOG, find
from warpline.kernels.catalog.rows import LAYERNORM
from warpline.kernels.driver import check, driver
from warpline.kernels.spec import KernelSpec, Launch, Variant


@pytest.mark.parametrize("status", ["UNSUPPORTED_PTX_VERSION", "NO_BINARY_FOR_GPU", "INVALID_IMAGE"])
def test_old_driver_is_told_from_other_failures(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """A driver of CUDA 12.4 that gets a binary of a newer compiler."""
    cuda = driver()
    monkeypatch.setattr(cuda, "cuDriverGetVersion", lambda: (cuda.CUresult.CUDA_SUCCESS, 12040))
    with pytest.raises(KernelError, match=r"loading x: \w+: the driver supports CUDA 12\.4 and the compiler"):
        check(getattr(cuda.CUresult, f"CUDA_ERROR_{status}"), "loading x")


def test_other_failures_are_named() -> None:
    cuda = driver()
    check(cuda.CUresult.CUDA_SUCCESS, "nothing")
    with pytest.raises(KernelError, match=r"launching x: CUDA_ERROR_LAUNCH_FAILED$"):
        check(cuda.CUresult.CUDA_ERROR_LAUNCH_FAILED, "launching x")


def test_tensors_on_the_cpu_are_refused() -> None:
    x, w = torch.zeros(4, 8), torch.zeros(8)
    with pytest.raises(ConfigError, match="on the CPU"):
        launch.run(LAYERNORM, [x, w, w])


def test_constant_memory_is_filled_when_it_holds_something_else() -> None:
    written: list[tuple[str, float]] = []

    class Module:
        def write(self, name: str, tensor: torch.Tensor) -> None:
            written.append((name, float(tensor[0])))

        def launch(self, *_: object, **__: object) -> None:
            pass

    kernel = object.__new__(launch.Kernel)
    kernel.__dict__.update({"_module": Module(), "_overlapping": False, "_held": {}})
    nothing = launch.Arguments([], [])
    one, other = torch.full((3,), 1.0), torch.full((3,), 2.0)
    for bias in (one, one, other, other, one):
        kernel.launch(Launch(1, 32), nothing, {"bias": bias})
    one += 2
    kernel.launch(Launch(1, 32), nothing, {"bias": one})
    assert written == [("bias", 1.0), ("bias", 2.0), ("bias", 1.0), ("bias", 3.0)]


def test_arguments_are_packed_as_the_kernel_declares_them() -> None:
    """Read back through the pointers, as the driver does: pointers, Views, negative ints, floats."""
    spec, dims = CATALOG["flash_attention"], {"batch": 2, "heads": 3, "queries": 5, "keys": 7, "depth": 64}
    q, k = torch.zeros(2, 5, 3, 64).transpose(1, 2), torch.zeros(2, 3, 7, 64)
    inputs, outputs = [q, k, k.clone(), torch.zeros(2, dtype=torch.int64)], [torch.zeros(2, 5, 3, 64)]
    variant = Variant.of(spec, "fp32", spec.dims_of([t.shape for t in inputs]), "sm_80")
    numbers = {**dims, **spec.number_values(dims, {"window": -3, "scale": 0.3})}
    packed = launch.Packing(variant, numbers).pack([*inputs, *outputs])
    named = dict(zip((b.name for b in (*spec.inputs, *spec.outputs)), [*inputs, *outputs], strict=True))
    for argument, at in zip(variant.parameters(), packed.pointers, strict=True):
        if isinstance(argument, Scalar):
            kind = ctypes.c_int if argument.is_int else ctypes.c_float
            assert kind.from_address(at).value == pytest.approx(numbers[argument.name])
        else:
            tensor = named[argument.name]
            wanted = [tensor.data_ptr(), *(tensor.stride()[:3] if argument.strided else ())]
            assert list((ctypes.c_int64 * len(wanted)).from_address(at)) == wanted


@pytest.mark.parametrize(
    ("tensor", "fine"),
    [
        (torch.zeros(2, 3, 5, 64, dtype=torch.half), True),
        (torch.zeros(2, 5, 3, 3, 64, dtype=torch.half)[:, :, 1].transpose(1, 2), True),  # q of a packed qkv
        (torch.zeros(2, 3, 64, 5, dtype=torch.half).transpose(2, 3), False),  # columns are not contiguous
        (torch.zeros(2, 3, 5, 65, dtype=torch.half)[..., :64], False),  # rows are not aligned to 16 bytes
        (torch.zeros(2, 3, 5, 65, dtype=torch.half), True),  # and need not be, at 65 columns
        (torch.zeros(1 + 2 * 3 * 5 * 64)[1:].view(2, 3, 5, 64), False),
    ],
)
def test_views_must_start_where_vectors_may(tensor: torch.Tensor, fine: bool) -> None:
    buffer = CATALOG["flash_attention"].inputs[0]
    if fine:
        launch._require(CATALOG["flash_attention"], buffer, tensor, tensor.dtype, tensor.device)
    else:
        with pytest.raises(ConfigError, match="q must be contiguous in its last dimension"):
            launch._require(CATALOG["flash_attention"], buffer, tensor, tensor.dtype, tensor.device)


def test_other_headers_of_cuda_make_another_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(compiler, "_cuda_headers", lambda: ["one"])
    before = compiler._key("unit", "sm_90")
    assert compiler._key("unit", "sm_90") == before
    monkeypatch.setattr(compiler, "_cuda_headers", lambda: ["another"])
    assert compiler._key("unit", "sm_90") != before


@pytest.mark.parametrize(("arch", "overlaps"), [("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_100", True)])
def test_launches_overlap_from_hopper_on(arch: str, overlaps: bool) -> None:
    made = Variant.of(find("layernorm"), "fp16", {"rows": 4, "columns": 768}, arch, overlapping=True)
    assert made.overlapping is overlaps


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_launches_are_whole_numbers(spec: KernelSpec, arch: str) -> None:
    for dtype in (dtype for dtype in spec.dtypes if spec.runs_on(dtype, arch)):
        for dims in spec.bench_dims:
            shape = Variant.of(spec, dtype, dims, arch).launch(dims)
            numbers = (shape.grid, shape.block, shape.shared_bytes + 1, shape.cluster, shape.teams)
            assert all(type(n) is int and n > 0 for n in numbers), (dtype, dims)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("depth", [24, 64, 128])
def test_flash_attention_has_memory_for_its_tiles(dtype: str, depth: int) -> None:
    """Queries, and keys and values in flight; in fp32 the scores as well, which tensor cores leave in registers."""
    spec, dims = find("flash_attention"), {"batch": 2, "heads": 3, "queries": 500, "keys": 500, "depth": depth}
    variant = Variant.of(spec, dtype, dims, "sm_80")
    tiles, size = dict(variant.tunables), 4 if dtype == "fp32" else 2
    flight = 1 if dtype == "fp32" else tiles["teams"] * tiles["stages"]
    least = (tiles["tile_queries"] + 2 * flight * tiles["tile_keys"]) * depth * size
    least += tiles["tile_queries"] * tiles["tile_keys"] * size if dtype == "fp32" else 0
    assert least <= variant.launch(dims).shared_bytes <= ARCH_LIMITS["sm_80"].block_shared_bytes
