"""The CUDA driver: the calls that an engine turn needs, and the meaning of its errors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from warpline.errors import KernelError
from warpline.kernels.compile import nvrtc_version


@functools.cache
def driver() -> Any:
    """Return the driver's bindings, which a machine without a GPU may lack."""
    from cuda.bindings import driver as bindings

    return bindings


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream; creating the stream object takes ten times as long."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def upload(target: Tensor, source: Tensor) -> None:
    """Enqueue a copy from pinned memory to a GPU on torch's current stream. It takes the host half as long as `copy_`,
    and may be captured. Requires: both tensors are contiguous and of the same size."""
    stream = current_stream(target.device.index)
    (status,) = driver().cuMemcpyHtoDAsync(target.data_ptr(), source.data_ptr(), source.nbytes, stream)
    check(status, "copying to the GPU")


def check(status: Any, doing: str) -> None:
    """Raise an error of one line unless `status` is success."""
    cuda = driver()
    result = cuda.CUresult
    if status == result.CUDA_SUCCESS:
        return
    remedy = ""
    if status in (
        result.CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        result.CUDA_ERROR_NO_BINARY_FOR_GPU,
        result.CUDA_ERROR_INVALID_IMAGE,
    ):
        _, version = cuda.cuDriverGetVersion()
        supported = f"{version // 1000}.{version % 1000 // 10}"
        remedy = f": the driver supports CUDA {supported} and the compiler is {nvrtc_version()}: update the driver"
        remedy += f", or install the nvidia-cuda-nvrtc of CUDA {supported}"
    raise KernelError(f"CUDA failed while {doing}: {status.name}{remedy}")
