"""What a launch checks before it needs a GPU."""

from __future__ import annotations

import pytest
import torch

from warpline.errors import ConfigError, KernelError
from warpline.kernels import launch
from warpline.kernels.catalog import CATALOG
from warpline.kernels.catalog.rows import LAYERNORM
from warpline.kernels.spec import Launch


@pytest.mark.parametrize("status", ["UNSUPPORTED_PTX_VERSION", "NO_BINARY_FOR_GPU", "INVALID_IMAGE"])
def test_old_driver_is_told_from_other_failures(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """A driver of CUDA 12.4 that is handed what a newer compiler made."""
    driver = launch._driver()
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult.CUDA_SUCCESS, 12040))
    with pytest.raises(KernelError, match=r"loading x: \w+: the driver supports CUDA 12\.4 and the compiler"):
        launch._check(driver, getattr(driver.CUresult, f"CUDA_ERROR_{status}"), "loading x")


def test_other_failures_are_named() -> None:
    driver = launch._driver()
    launch._check(driver, driver.CUresult.CUDA_SUCCESS, "nothing")
    with pytest.raises(KernelError, match=r"launching x: CUDA_ERROR_LAUNCH_FAILED$"):
        launch._check(driver, driver.CUresult.CUDA_ERROR_LAUNCH_FAILED, "launching x")


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
    state = {"_module": Module(), "_parameters": [], "_overlapping": False, "_constants": ["bias"], "_held": {}}
    kernel.__dict__.update(state)
    one, other = torch.full((3,), 1.0), torch.full((3,), 2.0)
    for bias in (one, one, other, other, one):
        kernel.launch(Launch(1, 32), {"bias": bias})
    one += 2
    kernel.launch(Launch(1, 32), {"bias": one})
    assert written == [("bias", 1.0), ("bias", 2.0), ("bias", 1.0), ("bias", 3.0)]


@pytest.mark.parametrize(
    ("tensor", "fine"),
    [
        (torch.zeros(2, 3, 5, 64, dtype=torch.half), True),
        (torch.zeros(2, 5, 3, 3, 64, dtype=torch.half)[:, :, 1].transpose(1, 2), True),  # q of a packed qkv
        (torch.zeros(2, 3, 64, 5, dtype=torch.half).transpose(2, 3), False),  # columns are no neighbours
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
