"""Compiled programs: `build` makes them in a process of its own when they are first needed, and they are kept as files.

A file's name covers everything its content depends on (`machine.key`), so an older one, or one for another CPU, is
never found; a damaged one is detected by its checksum.
"""

from __future__ import annotations

import functools
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import warpline
from warpline.errors import KernelError
from warpline.hardware import cache_dir
from warpline.kernels.cpu import machine
from warpline.progress import progress

logger = logging.getLogger(__name__)

#: `python -m warpline.kernels.cpu.build`, of this very package, wherever it is installed.
_START = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("warpline.kernels.cpu.build", run_name="__main__", alter_sys=True)
"""


@functools.cache
def build(stored: str, cached: str, activation: str) -> Build:
    """Return the decode function (`decode.program`) for dtypes of weights and cache, and an activation. Starts
    compiling it if it is not stored, and does not wait."""
    return Build(stored, cached, activation)


class Build:
    """A program that is loaded or being compiled."""

    def __init__(self, *names: str):
        self._path = cache_dir() / "cpu" / f"{'-'.join(names)}-{machine.key()}.o"
        self._compiler: subprocess.Popen[bytes] | None = None
        self._loading = threading.Lock()
        if (code := machine.kept(self._path)) is not None:
            self._function = machine.loaded(code)
            return
        try:
            self._compiler = subprocess.Popen(
                [sys.executable, "-c", _START, str(Path(warpline.__file__).parent.parent), str(self._path), *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise KernelError(
                f"cannot start {sys.executable!r} to compile for this CPU ({error.strerror}): use --executor torch"
            ) from error

    def function(self) -> Callable[[int, int], None]:
        """Return the function, which takes a thread's number and the address of the words; waits for the compiler if
        needed."""
        if self._compiler is not None:
            with self._loading:  # the engines of several threads share a program
                if self._compiler is not None:
                    self._load(self._compiler)
        return self._function

    def _load(self, compiler: subprocess.Popen[bytes]) -> None:
        if compiler.returncode:  # an earlier wait failed
            raise KernelError("compiling for this CPU failed: use --executor torch")
        code = self._wait(compiler)
        self._function, self._compiler = machine.loaded(code), None
        if machine.kept(self._path) is None:
            logger.warning(
                "compiled code cannot be kept in %s, so every start compiles again: set WARPLINE_CACHE_DIR to a "
                "folder that can be written to",
                self._path.parent,
            )

    def _wait(self, compiler: subprocess.Popen[bytes]) -> bytes:
        with progress("Compiling for this CPU (once)"), compiler:
            code, said = compiler.communicate()
        if compiler.returncode != 0:
            raise KernelError(f"compiling for this CPU failed ({_reason(said)}): use --executor torch")
        return code


def _reason(said: bytes) -> str:
    """Return the line of a traceback that names the error; numba's go on after it, in colours."""
    lines = re.sub(r"\x1b\[\d*m", "", said.decode(errors="replace")).strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (named or lines or ["no reason given"])[-1].strip()
