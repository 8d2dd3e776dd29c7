"""Compiles a program to machine code: translation unit → NVRTC → cubin, kept on disk.

Needs NVRTC and two CUDA headers, all from pip packages; no GPU, toolkit or host compiler. The cache key covers
everything that can change the result. An entry is written to a temporary file and renamed, so another process sees
either all of it or nothing; a damaged entry is detected by its digest and compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from warpline.errors import KernelError
from warpline.hardware import cache_dir
from warpline.progress import progress

SOURCE = Path(__file__).parent / "cuda"
#: NVRTC's own cache would omit the assembler's report; ours keeps it.
FLAGS = ("--std=c++17", "--device-as-default-execution-space", "--no-cache")
_COMMENT = re.compile(r"\s*//[^\n]*")
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)

logger = logging.getLogger(__name__)
_warned = threading.Event()


@dataclass(frozen=True, slots=True)
class Report:
    """The assembler's report on a kernel; None where only PTX was made."""

    registers: int | None
    shared_bytes: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    seconds: float
    cached: bool = False


class Program(Protocol):
    """A program to compile: a variant of an op, or the persistent decode kernel."""

    @property
    def name(self) -> str:
        """The first part of its file name in the cache."""

    @property
    def label(self) -> str:
        """A readable description, for messages."""

    @property
    def entry(self) -> str:
        """The kernel's name."""

    def translation_unit(self) -> str:
        """Return the CUDA C++ source, with one kernel in it."""


P = TypeVar("P", bound=Program)


@dataclass(frozen=True, slots=True)
class Binary(Generic[P]):
    """A compiled program: a cubin for an arch such as sm_90, or PTX for compute_75."""

    program: P
    arch: str
    code: bytes
    report: Report


def compile_one(program: P, arch: str) -> Binary[P]:
    """Return the binary of a program, from the cache or compiled now."""
    unit = program.translation_unit()
    path = cache_dir() / "kernels" / f"{program.name}-{_key(unit, arch)}.bin"
    stored = _load(path)
    if stored is not None:
        return Binary(program, arch, *stored)
    start = time.perf_counter()
    code, log = _nvrtc(unit, arch, program.label)
    report = _parse(log, time.perf_counter() - start)
    _store(path, code, report)
    return Binary(program, arch, code, report)


def compile_many(jobs: Sequence[tuple[P, str]]) -> list[Binary[P]]:
    """Compile (program, arch) pairs on all cores, with a progress bar if it takes long."""
    with progress("Compiling kernels", len(jobs)) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(compile_one, program, arch) for program, arch in jobs]
        results = []
        for future in futures:
            results.append(future.result())
            advance(1)
    return results


# --- the cache --------------------------------------------------------------------------------------------------------


def _key(unit: str, arch: str) -> str:
    digest = hashlib.sha256()
    for part in (nvrtc_version(), _target(arch), *FLAGS, unit, *_own_headers(unit), *_cuda_headers()):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def _target(arch: str) -> str:
    """Return NVRTC's target: sm_90a for sm_90, which includes the instructions that only this generation has."""
    return f"{arch}a" if arch == "sm_90" else arch


def _own_headers(unit: str) -> list[str]:
    """Return the code, without comments, of every own header that `unit` includes, directly or not."""
    texts: dict[str, str] = {}
    waiting = _INCLUDE.findall(unit)
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = _COMMENT.sub("", (SOURCE / name).read_text(encoding="utf-8"))
            waiting += _INCLUDE.findall(texts[name])
    return [texts[name] for name in sorted(texts)]


@functools.cache
def header_digest(header: str) -> str:
    """Return the digest of one of our headers and of those it includes: measurements hold for this code."""
    digest = hashlib.sha256()
    for text in _own_headers(f'#include "{header}"'):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _load(path: Path) -> tuple[bytes, Report] | None:
    try:
        head, _, code = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read %s (%s): compiling again", path, error)
        return None
    try:
        meta = json.loads(head)
        if meta["sha256"] != hashlib.sha256(code).hexdigest():
            raise ValueError("its digest does not match")
        return code, replace(Report(**meta["report"]), cached=True)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s): compiling again", path, error)
        return None


def _store(path: Path, code: bytes, report: Report) -> None:
    head = json.dumps({"sha256": hashlib.sha256(code).hexdigest(), "report": asdict(report)}).encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(head + b"\n" + code)
        partial.replace(path)
    except OSError as error:
        partial_left = _remove(partial)
        if not _warned.is_set():  # warn once: the kernel works, but is compiled again next time
            _warned.set()
            logger.warning(
                "compiled kernels cannot be kept in %s (%s%s): set WARPLINE_CACHE_DIR to a writable folder",
                path.parent,
                error.strerror or error,
                partial_left,
            )


def _remove(path: Path) -> str:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return f"; {path.name} is left over"
    return ""


# --- NVRTC ------------------------------------------------------------------------------------------------------------


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise KernelError("compiling kernels needs NVRTC: pip install 'warpline[cuda]'") from None
    return nvrtc


@functools.cache
def nvrtc_version() -> str:
    """Return the version of the compiler, such as "13.0"."""
    nvrtc = _bindings()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library behind the bindings is missing
        reason = str(error).splitlines()[0]
        raise KernelError(f"NVRTC cannot be loaded ({reason}): pip install 'warpline[cuda]'") from error
    _check(nvrtc, status, "asking for its version")
    return f"{major}.{minor}"


@functools.cache
def _include_folder() -> Path:
    """Return the folder of cuda_fp16.h: the runtime's package or a toolkit, else the headers that NVRTC 13.3 and newer
    bring."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is not None and (Path(found) / "cuda_fp16.h").exists():
        return Path(found)
    nvrtc = _bindings()
    if not hasattr(nvrtc, "nvrtcInstallBundledHeaders"):
        raise KernelError(
            "cuda_fp16.h was not found: pip install nvidia-cuda-runtime, or nvidia-cuda-nvrtc 13.3 or newer"
        )
    folder = cache_dir() / "nvrtc-headers" / nvrtc_version()
    if not (folder / ".nvrtc_headers_version").exists():  # NVRTC writes this file last
        status, *_ = nvrtc.nvrtcInstallBundledHeaders(str(folder).encode(), 0)
        _check(nvrtc, status, f"installing its headers into {folder}: set WARPLINE_CACHE_DIR to a writable folder")
    return folder


@functools.cache
def _cuda_headers() -> tuple[str, ...]:
    """Return digests of the CUDA headers that kernels may include; older toolkits split them into .h and .hpp."""
    paths = sorted(path for name in ("cuda_fp16.h*", "cuda_bf16.h*") for path in _include_folder().glob(name))
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)


def _nvrtc(unit: str, arch: str, label: str) -> tuple[bytes, str]:
    nvrtc = _bindings()
    ptx = arch.startswith("compute_")
    options = [f"--gpu-architecture={_target(arch)}", *FLAGS, f"-I{SOURCE}", f"-I{_include_folder()}"]
    if not ptx:
        options.append("--ptxas-options=-v")
    status, program = nvrtc.nvrtcCreateProgram(unit.encode(), b"warpline.cu", 0, None, None)
    _check(nvrtc, status, "creating a program")
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _fetch(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0 \n")
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"{label} does not compile for {arch} with NVRTC {nvrtc_version()}: {log or result}")
    code = _fetch(nvrtc, program, "PTX" if ptx else "CUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return code, log


def _fetch(nvrtc: Any, program: Any, what: str) -> bytes:
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, status, f"reading the size of its {what}")
    # A bytearray, not bytes: NVRTC writes into it, and Python shares one object for all equal bytes of length 1.
    buffer = bytearray(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, status, f"reading its {what}")
    return bytes(buffer)


def _check(nvrtc: Any, status: Any, doing: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC failed while {doing}: {status}")


def _parse(log: str, seconds: float) -> Report:
    def number(pattern: str) -> int | None:
        found = re.findall(pattern, log)
        return sum(map(int, found)) if found else None

    registers = number(r"Used (\d+) registers")
    return Report(
        registers=registers,
        shared_bytes=None if registers is None else number(r"(\d+) bytes smem") or 0,
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
        seconds=round(seconds, 4),
    )
