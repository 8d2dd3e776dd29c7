"""What this machine has: devices with their measured bandwidth, software, and what would make it faster."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Any

from warpline import __version__, hardware

#: The oldest GPU generation the CUDA kernels are compiled for.
OLDEST_ARCH = min(hardware.arch_number(arch) for arch in hardware.ARCH_LIMITS)


@dataclass(frozen=True, slots=True)
class Survey:
    """One machine."""

    software: dict[str, str | None]
    devices: list[hardware.Device]
    cache_folder: str
    cache_bytes: int
    advice: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def take() -> Survey:
    """Look around; measures the bandwidth of every device and remembers it."""
    import torch

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    devices = [hardware.remember_bandwidth(hardware.describe(name), hardware.measure_bandwidth(name)) for name in names]
    software = {
        "warpline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "NVIDIA driver": driver_version(),
        "NVRTC": _nvrtc_version(),
    }
    folder = hardware.cache_dir()
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Survey(software, devices, str(folder), used, _advice(software, devices, torch.get_num_threads()))


def _advice(software: dict[str, str | None], devices: list[hardware.Device], threads: int) -> list[str]:
    advice = []
    gpus = [device for device in devices if device.kind == "cuda"]
    cores = devices[0].units
    if not gpus and _has_nvidia_gpu():
        if software["CUDA of torch"] is None:
            advice.append("This machine has an NVIDIA GPU, but torch is a CPU build: install a CUDA build of torch.")
        else:
            advice.append("This machine has an NVIDIA GPU that torch cannot use: check the driver with nvidia-smi.")
    elif not gpus:
        advice.append("No GPU: everything runs on the CPU; a GPU with 10 times the bandwidth decodes 10 times faster.")
    for gpu in gpus:
        if gpu.arch and hardware.arch_number(gpu.arch) < OLDEST_ARCH:
            advice.append(f"{gpu.name} is {gpu.arch}: the CUDA kernels need sm_{OLDEST_ARCH}; only torch runs there.")
    if gpus and software["NVRTC"] is None:
        advice.append("NVRTC was not found, which compiling CUDA kernels needs: pip install nvidia-cuda-nvrtc.")
    if cores is not None and threads < cores:
        advice.append(f"torch uses {threads} of {cores} cores: unset OMP_NUM_THREADS to use them all.")
    return advice


def _has_nvidia_gpu() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None


def driver_version() -> str | None:
    """The driver's own version, as Linux reports it, or the CUDA version it supports."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except FileNotFoundError:
        return None
    return next((word for word in words if word[0].isdigit()), None)


def _nvrtc_version() -> str | None:
    if sys.platform != "linux":
        return None
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError:
        return None
    library = ctypes.CDLL(path)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"
