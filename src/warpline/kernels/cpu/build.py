"""Compiles a program for this CPU: `python -m warpline.kernels.cpu.build FILE fp32 fp32 gelu_tanh` stores it in a file
and writes it to standard output.

It runs in a process of its own: numba's front end takes seconds and holds Python's lock. There it can also be told not
to optimise the parts, because the whole is optimised once, without affecting other users of numba.
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

#: Types of stored values in compiled code: half precision goes by its bits.
SEEN = {"fp32": np.float32, "fp16": np.int16, "bf16": np.uint16, "int8": np.int8}

#: Functions whose sums the compiler may reorder: one copy of each, so that all callers add in the same order.
ONE_COPY = ("normalise", "weight_above", "sum_of_exp")


def lowered(stored: str, cached: str, activation: str) -> str:
    """Return the program as LLVM IR, not optimised."""
    function = program(SEEN[stored], SEEN[cached], activation, wide=machine.is_wide())
    made = cfunc(types.void(types.int64, types.int64), error_model="numpy", _nrt=False)(function)
    return str(made.inspect_llvm()).replace(made.native_name, ENTRY)


if __name__ == "__main__":
    code = machine.compiled(lowered(*sys.argv[2:]), apart=ONE_COPY)
    with contextlib.suppress(OSError):  # the process that asked for it notices that the file is missing, and logs it
        machine.keep(Path(sys.argv[1]), code)
    with contextlib.suppress(BrokenPipeError):  # that process has ended; the next one finds the file
        sys.stdout.buffer.write(code)
        sys.stdout.buffer.flush()
