"""The CPU that code is compiled for: its identification, and storing and loading of its code."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

#: The name of the function in an object file.
ENTRY = "warpline_decode"
_CHECK = 16  # bytes of checksum before the code

logger = logging.getLogger(__name__)


@functools.cache
def _host() -> tuple[str, str, str]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def features() -> str:
    """Return the CPU's features by LLVM's names."""
    return _host()[2]


def is_wide() -> bool:
    """Whether its vectors have 64 bytes."""
    return "+avx512f" in features()


def target() -> Any:
    """Return LLVM's target machine for the CPU."""
    triple, cpu, features = _host()
    found = llvm.Target.from_triple(triple)
    return found.create_target_machine(cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True)


@functools.cache
def key() -> str:
    """Return a digest of everything that compiled code depends on: the sources here, the compiler, the CPU and its
    features."""
    facts = [*_host(), version("numba"), version("llvmlite")]
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.blake2b(b"\0".join([*sources, *(fact.encode() for fact in facts)]), digest_size=8).hexdigest()


def compiled(source: str, apart: Sequence[str] = ()) -> bytes:
    """Compile an LLVM module to machine code. Only the entry is visible from outside, so the optimiser may change or
    remove everything else; functions with a name in `apart` are not inlined."""
    module, cpu = llvm.parse_assembly(source), target()
    missing = [name for name in apart if not any(name in function.name for function in module.functions)]
    if missing:
        raise ValueError(f"no function is called {', '.join(missing)}")
    for function in module.functions:
        if not function.is_declaration and function.name != ENTRY:
            function.linkage = "internal"
            if any(name in function.name for name in apart):
                function.add_function_attribute("noinline")
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.loop_interleaving = options.loop_unrolling = options.slp_vectorization = True
    passes = llvm.create_pass_builder(cpu, options)
    passes.getModulePassManager().run(module, passes)
    return bytes(cpu.emit_object(module))


def kept(path: Path) -> bytes | None:
    """Return the code in a file, or None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("cannot read %s (%s): compiling again", path, error.strerror)
        return None
    check, code = content[:_CHECK], content[_CHECK:]
    if hashlib.blake2b(code, digest_size=_CHECK).digest() != check:
        logger.warning("%s is damaged: compiling again", path)
        return None
    return code


def keep(path: Path, code: bytes) -> None:
    """Write the code to a temporary file and rename it; a process that compiles at the same time writes the same."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(hashlib.blake2b(code, digest_size=_CHECK).digest() + code)
    partial.replace(path)


#: LLVM's objects must not be used by two threads at a time.
_LLVM = threading.Lock()


def loaded(code: bytes) -> Callable[[int, int], None]:
    """Return the function in an object file. It runs without Python's lock, and keeps its memory alive."""
    with _LLVM:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target())
        engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
        engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(engine.get_function_address(ENTRY))
    function.engine = engine  # type: ignore[attr-defined]
    return function
