"""What this machine has: devices with their measured bandwidth, software, and advice that would make it faster."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from warpline import __version__, hardware

#: The oldest GPU generation the CUDA kernels are compiled for.
OLDEST_ARCH = min(hardware.arch_number(arch) for arch in hardware.ARCH_LIMITS)

#: What each extra adds.
EXTRAS = {
    "cuda": "the CUDA kernels",
    "hub": "models by their hub id",
    "hf": "patching transformers",
    "plot": "charts",
    "serve": "the server and chat",
    "parquet": "tables of prompts",
    "ray": "replicas",
    "peers": "others to measure against",
}
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*;.*\bextra == ['\"](?P<extra>[\w-]+)['\"]")


@dataclass(frozen=True, slots=True)
class Survey:
    """The survey of one machine."""

    software: dict[str, str | None]
    devices: list[hardware.Device]
    cache_folder: str
    cache_bytes: int
    extras: dict[str, list[str]]  # per extra, its packages that are not installed
    advice: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the survey as a JSON object."""
        return asdict(self)


def take() -> Survey:
    """Survey this machine; this measures the bandwidth of every device and stores it."""
    import torch

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    devices = [hardware.remember_bandwidth(hardware.describe(name), _bandwidth(name)) for name in names]
    software = {
        "warpline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "NVIDIA driver": hardware.driver_version(),
        "NVRTC": _nvrtc_version(),
    }
    folder = hardware.cache_dir()
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    extras = missing_extras()
    return Survey(
        software, devices, str(folder), used, extras, _advice(software, devices, torch.get_num_threads(), extras)
    )


def _bandwidth(device: str) -> float:
    if device == "cpu":
        from warpline.kernels.cpu import limits

        return limits.read_gb_s()
    return hardware.measure_bandwidth(device)


def _advice(
    software: dict[str, str | None], devices: list[hardware.Device], threads: int, extras: dict[str, list[str]]
) -> list[str]:
    advice = []
    gpus = [device for device in devices if device.kind == "cuda"]
    cores = devices[0].units
    if not gpus and _has_nvidia_gpu():
        if software["CUDA of torch"] is None:
            advice.append("This machine has an NVIDIA GPU, but torch is a CPU build: install a CUDA build of torch.")
        else:
            advice.append("This machine has an NVIDIA GPU that torch cannot use: check the driver with nvidia-smi.")
    elif not gpus:
        advice.append("No GPU: 'auto' means the cpu executor here; --dtype int8 reads a quarter of the bytes.")
    for gpu in gpus:
        if gpu.arch and hardware.arch_number(gpu.arch) < OLDEST_ARCH:
            advice.append(f"{gpu.name} is {gpu.arch}: the CUDA kernels need sm_{OLDEST_ARCH}; only torch runs there.")
    if gpus and software["NVRTC"] is None:
        advice.append("NVRTC was not found, which compiling CUDA kernels needs: pip install 'warpline[cuda]'.")
    if cores is not None and threads < cores:
        advice.append(f"torch uses {threads} of {cores} cores: unset OMP_NUM_THREADS to use them all.")
    if lacking := [name for name, packages in extras.items() if packages and (gpus or name != "cuda")]:
        advice.append(f"pip install 'warpline[{','.join(lacking)}]' brings {_and([EXTRAS[name] for name in lacking])}.")
    return advice


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def missing_extras() -> dict[str, list[str]]:
    """Return per extra for users its packages that are not installed, from the package's own metadata."""
    try:
        wanted = metadata.requires("warpline") or []
    except metadata.PackageNotFoundError:  # run from the sources, not installed
        return {}
    found: dict[str, list[str]] = {name: [] for name in EXTRAS}
    for line in wanted:
        match = _REQUIREMENT.match(line)
        if match is not None and match["extra"] in found and not _installed(match["name"]):
            found[match["extra"]].append(match["name"])
    return found


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _has_nvidia_gpu() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None


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
