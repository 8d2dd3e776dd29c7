"""Compiles a program for this CPU: `python -m warpline.kernels.cpu.build FILE fp32 fp32 gelu_tanh` keeps it in a file
and writes it to standard output.

A process of its own, beside the one that wants it: numba's front end takes seconds and Python's lock, and here it can
be told not to optimise the parts, which is done once for the whole, without changing what it does for others.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

os.environ |= {"NUMBA_OPT": "0", "NUMBA_LOOP_VECTORIZE": "0"}

import numpy as np
from numba import cfunc, types

from warpline.kernels.cpu import machine
from warpline.kernels.cpu.decode import program
from warpline.kernels.cpu.machine import ENTRY

#: How compiled code sees what is stored: half precision goes by its bits.
SEEN = {"fp32": np.float32, "fp16": np.int16, "bf16": np.uint16, "int8": np.int8}

#: Functions whose sums the compiler may put in any order: one copy of each, so that it is the same one everywhere.
ONE_COPY = ("normalise", "mass_above", "sum_of_exp")


def lowered(stored: str, cached: str, activation: str) -> str:
    """LLVM's language, not optimised."""
    function = program(SEEN[stored], SEEN[cached], activation, wide=machine.is_wide())
    made = cfunc(types.void(types.int64, types.int64), error_model="numpy", _nrt=False)(function)
    return str(made.inspect_llvm()).replace(made.native_name, ENTRY)


if __name__ == "__main__":
    code = machine.compiled(lowered(*sys.argv[2:]), apart=ONE_COPY)
    with contextlib.suppress(OSError):  # the process that asked for it sees that it is not there, and says so
        machine.keep(Path(sys.argv[1]), code)
    with contextlib.suppress(BrokenPipeError):  # no process waits any more; the next one finds the file
        sys.stdout.buffer.write(code)
        sys.stdout.buffer.flush()
