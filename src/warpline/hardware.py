"""What a GPU or CPU can do: published peaks of known GPUs, and peaks measured on this machine.

An unknown figure is None and prints as "n/a"; nothing is guessed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from warpline.errors import DeviceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device. Bandwidths in GB/s, rates in TFLOP/s, memory in GB."""

    name: str
    kind: str  # "cpu" or "cuda"
    arch: str | None = None  # "sm_75"
    units: int | None = None  # SMs or cores
    memory_gb: float | None = None
    spec_bandwidth: float | None = None
    tensor_tflops: float | None = None  # dense fp16 with fp32 accumulation
    fp32_tflops: float | None = None
    measured_bandwidth: float | None = None  # for reading, on this machine

    @property
    def limit(self) -> tuple[float, str] | None:
        """The bandwidth to compare with, and its source: measured if it is known, else published."""
        if self.measured_bandwidth is not None:
            return self.measured_bandwidth, "measured"
        if self.spec_bandwidth is not None:
            return self.spec_bandwidth, "spec"
        return None

    def supports(self, dtype: str) -> bool:
        """Whether the device computes in `dtype`."""
        return self.kind != "cuda" or self.arch is None or arch_supports(self.arch, dtype)


def wake_gpu(device: str) -> None:
    """Start the driver's set-up of the GPU `device` in a thread, while torch is imported: the first use of the GPU then
    need not wait for 0.3 s (H200). If it fails, the first use will raise."""
    if device != "auto" and not device.startswith("cuda"):
        return

    def wake() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:  # no driver, so nothing to start
            return
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), int(device.partition(":")[2] or 0)) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)

    threading.Thread(target=wake, daemon=True, name="wake-gpu").start()


def arch_number(arch: str) -> int:
    """Return the number of an arch: sm_75 → 75, sm_90a → 90, compute_75 → 75."""
    return int(arch.partition("_")[2].rstrip("af"))


def arch_supports(arch: str, dtype: str) -> bool:
    """Whether a GPU generation computes in `dtype`: bf16 needs sm_80."""
    return dtype != "bf16" or arch_number(arch) >= 80


@dataclass(frozen=True, slots=True)
class ArchLimits:
    """Limits of a multiprocessor of a GPU generation."""

    block_shared_bytes: int  # the most that one block can have
    shared_bytes: int
    threads: int
    blocks: int
    registers: int = 65536


#: The archs that kernels are compiled for.
ARCH_LIMITS = {
    "sm_75": ArchLimits(64 << 10, 64 << 10, 1024, 16),
    "sm_80": ArchLimits(163 << 10, 164 << 10, 2048, 32),
    "sm_86": ArchLimits(99 << 10, 100 << 10, 1536, 16),
    "sm_89": ArchLimits(99 << 10, 100 << 10, 1536, 24),
    "sm_90": ArchLimits(227 << 10, 228 << 10, 2048, 32),
    "sm_100": ArchLimits(227 << 10, 228 << 10, 2048, 32),
    "sm_120": ArchLimits(99 << 10, 100 << 10, 1536, 24),
}


def resident_blocks(arch: str, threads: int, registers: int, shared_bytes: int) -> int:
    """Return how many blocks of a kernel a multiprocessor holds at once. With 0 the kernel cannot be launched at all; a
    kernel with blocks that wait for one another can have at most this many per multiprocessor."""
    limits = ARCH_LIMITS[arch]
    if shared_bytes > limits.block_shared_bytes:
        return 0
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256  # warps get registers in units of 256
    reserved = 0 if arch == "sm_75" else 1024  # of shared memory, in every block
    by_shared = limits.shared_bytes // (shared_bytes + reserved) if shared_bytes + reserved else limits.blocks
    return min(limits.blocks, limits.threads // (warps * 32), limits.registers // (per_warp * warps), by_shared)


def _gpu(name: str, arch: int, sms: int, memory: float, bandwidth: float, tensor: float, fp32: float) -> Device:
    return Device(
        name=name,
        kind="cuda",
        arch=f"sm_{arch}",
        units=sms,
        memory_gb=memory,
        spec_bandwidth=bandwidth,
        tensor_tflops=tensor,
        fp32_tflops=fp32,
    )


#: Vendor datasheets, under the names the driver reports.
KNOWN_GPUS: tuple[Device, ...] = (
    _gpu("Tesla T4", 75, 40, 16, 320, 65, 8.1),
    _gpu("Tesla V100-SXM2", 70, 80, 16, 900, 125, 15.7),
    _gpu("Tesla V100-PCIE", 70, 80, 16, 900, 112, 14),
    _gpu("NVIDIA A10", 86, 72, 24, 600, 125, 31.2),
    _gpu("NVIDIA L4", 89, 58, 24, 300, 121, 30.3),
    _gpu("NVIDIA GeForce RTX 3090", 86, 82, 24, 936, 71, 35.6),
    _gpu("NVIDIA GeForce RTX 4090", 89, 128, 24, 1008, 165, 82.6),
    _gpu("NVIDIA GeForce RTX 5090", 120, 170, 32, 1792, 209.5, 104.8),
    _gpu("NVIDIA A100-SXM4-40GB", 80, 108, 40, 1555, 312, 19.5),
    _gpu("NVIDIA A100-PCIE-40GB", 80, 108, 40, 1555, 312, 19.5),
    _gpu("NVIDIA A100-SXM4-80GB", 80, 108, 80, 2039, 312, 19.5),
    _gpu("NVIDIA A100 80GB PCIe", 80, 108, 80, 1935, 312, 19.5),
    _gpu("NVIDIA H100 PCIe", 90, 114, 80, 2039, 756, 51.2),
    _gpu("NVIDIA H100 80GB HBM3", 90, 132, 80, 3350, 989, 66.9),
    _gpu("NVIDIA H200", 90, 132, 141, 4800, 989, 66.9),
    _gpu("NVIDIA B200", 100, 148, 180, 8000, 2250, 75),
)


def known_gpu(name: str) -> Device | None:
    """Return the datasheet entry for a driver's device name ("Tesla V100-SXM2-32GB") or a short one ("t4", "a100")."""
    words = _words(name)
    for device in KNOWN_GPUS:
        entry = _words(device.name)
        # Another memory size is the same card, but "Laptop", "Ti" or "D" is another one: then the figures are unknown.
        if entry <= words and all(re.fullmatch(r"\d+gb", word) for word in words - entry):
            return device
    return next((device for device in KNOWN_GPUS if words and words <= _words(device.name)), None)


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", " ").split())


def describe(device: str) -> Device:
    """Return the device that torch calls `device` ("cpu", "cuda", "cuda:1"), with the bandwidth measured earlier."""
    found = _describe_cpu() if device == "cpu" else _describe_gpu(device)
    return replace(found, measured_bandwidth=_load_measured().get(_key(found)))


def _describe_gpu(device: str) -> Device:
    import torch

    index = torch.device(device).index or 0
    if not torch.cuda.is_available():
        raise DeviceError(f"device '{device}' was asked for, but torch sees no CUDA GPU here: use --device cpu")
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no device '{device}': this machine has {torch.cuda.device_count()} GPU(s)")
    properties = torch.cuda.get_device_properties(index)
    spec = known_gpu(properties.name) or Device(name=properties.name, kind="cuda")
    return replace(
        spec,
        name=properties.name,
        arch=f"sm_{properties.major}{properties.minor}",
        units=properties.multi_processor_count,
        memory_gb=properties.total_memory / 1e9,
    )


def _describe_cpu() -> Device:
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Device(name=_cpu_name(), kind="cpu", arch=platform.machine(), units=_cpu_count(), memory_gb=memory)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_count() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def threads() -> int:
    """Return the threads that can run at once: torch's number, limited by the cores and the quota of this process."""
    import torch

    return max(1, min(torch.get_num_threads(), _cpu_count() or 1, _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that a container may use, rounded up; a large number without a limit."""
    try:
        allowed, period = path.read_text().split()
        return -(-int(allowed) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 16


def measure_bandwidth(device: str, megabytes: int = 512, repeats: int = 5) -> float:
    """Return a GPU's read bandwidth in GB/s over so much memory: the best of several passes of torch's matrix-vector
    product and sum. For a CPU see kernels/cpu/limits.py."""
    import torch

    rows = max(1, megabytes * 1_000_000 // (4 * 1024))
    matrix = torch.empty(rows, 1024, device=device).uniform_(-1, 1)
    vector = torch.empty(1024, device=device).uniform_(-1, 1)

    def seconds(read: Callable[[], object]) -> float:
        torch.cuda.synchronize(matrix.device)
        start = time.perf_counter()
        read()
        torch.cuda.synchronize(matrix.device)
        return time.perf_counter() - start

    ways = (lambda: torch.mv(matrix, vector), matrix.sum)
    return matrix.nbytes / min(seconds(way) for _ in range(1 + repeats) for way in ways) / 1e9


def driver_version() -> str | None:
    """Return the NVIDIA driver's version as Linux reports it; None without a driver."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except FileNotFoundError:
        return None
    return next((word for word in words if word[0].isdigit()), None)


def free_bytes(device: str) -> int | None:
    """Return the memory of `device` in bytes that can be allocated now; None if unknown."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def cache_bytes(device: str) -> int | None:
    """Return the size of the largest cache of `device` in bytes; None if unknown."""
    if device != "cpu":
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((1024 * int(size.removesuffix("K")) for size in sizes if re.fullmatch(r"\d+K", size)), default=None)


def current_cpu() -> int:
    """Return the CPU that the calling thread runs on; -1 if unknown (on any system but Linux)."""
    if (ask := _asks_for_cpu()) is None:
        return -1
    return int(ask())


@functools.cache
def _asks_for_cpu() -> Callable[[], int] | None:
    return getattr(ctypes.CDLL(None), "sched_getcpu", None) if platform.system() == "Linux" else None


def allowed_cpus() -> set[int]:
    """Return the CPUs that the calling thread may run on; empty if unknown."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def restrict_to(cpus: set[int]) -> bool:
    """Restrict the calling thread to these CPUs; return whether the system allows it."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.debug("cannot choose CPUs: %s", error.strerror)
        return False
    return True


def give_back_freed_memory() -> None:
    """Return freed memory to the system, which the C library (glibc) would keep for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if platform.system() == "Linux" else None
    if trim is not None:
        trim(0)


def peak_process_bytes() -> int:
    """Return the peak memory of this process in bytes. It reads Linux's count, because getrusage reports at least what
    the parent process had when it started this one."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * int(lines["VmHWM"].split()[0])
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def clocks(device: str) -> dict[str, int] | None:
    """Return the present clocks of a GPU in MHz, of its SMs and its memory; None without nvidia-smi."""
    if device == "cpu" or shutil.which("nvidia-smi") is None:
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)  # torch's numbering may differ from nvidia-smi's
    query = ["--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits", f"--id=GPU-{properties.uuid}"]
    answer = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=False).stdout.split(",")
    return dict(zip(("sm", "memory"), map(int, answer), strict=True)) if len(answer) == 2 else None


def cache_dir() -> Path:
    """Return the folder for what Warpline measured or built: WARPLINE_CACHE_DIR, or a folder in the user's home."""
    chosen = os.environ.get("WARPLINE_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "warpline"


def _key(device: Device) -> str:
    return f"{device.name} x{device.units}" if device.kind == "cpu" else device.name


def _load_measured() -> dict[str, float]:
    path = cache_dir() / "bandwidth.json"
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("no JSON object")
        return {str(name): float(value) for name, value in raw.items() if float(value) > 0}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        logger.warning("cannot read %s (%s): measured bandwidths are unknown until 'warpline doctor' runs", path, error)
        return {}


def remember_bandwidth(device: Device, bandwidth: float) -> Device:
    """Store a measured bandwidth for later runs and return the device with it.

    The peak is the best of all runs: a measurement on a busy machine does not lower it.
    """
    path = cache_dir() / "bandwidth.json"
    measured = _load_measured()
    bandwidth = measured[_key(device)] = max(round(bandwidth, 2), measured.get(_key(device), 0.0))
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(measured, indent=1))
        partial.replace(path)
    except OSError as error:
        logger.warning("cannot write %s (%s): set WARPLINE_CACHE_DIR to a writable folder", path, error)
    return replace(device, measured_bandwidth=bandwidth)
