"""The ladder of GELU after a bias: no computation to save, only bytes to keep in flight."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from warpline.kernels.arguments import Dims
from warpline.kernels.catalog import find
from warpline.kernels.ladder.rung import Ladder, Rung, below, in_constant_memory
from warpline.kernels.spec import Launch, Tunables

if TYPE_CHECKING:
    from torch import Tensor

_TOP, _FAST = find("bias_gelu"), find("bias_gelu_fast")
_BLOCK, _RUN, _UNROLL = 256, 16, 4


def _eager(x: Tensor, bias: Tensor) -> Tensor:
    """The formula op by op, as models wrote it before there was an op for it."""
    x = x + bias
    return 0.5 * x * (1.0 + (0.7978845608028654 * (x + 0.044715 * x.pow(3.0))).tanh())


def _runs(dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    return Launch(-(-dims["rows"] * dims["columns"] // (_BLOCK * _RUN)), _BLOCK)


def _vectors(unroll: int, widest: int, dims: Dims, _tunables: Tunables, _dtype: str) -> Launch:
    """Return a launch with vectors of up to `widest` elements, as wide as every row allows: `vector_width` of
    common.cuh."""
    width = next(w for w in (4, 2, 1) if w <= widest and dims["columns"] % w == 0)
    return Launch(-(-dims["rows"] * dims["columns"] // (width * _BLOCK * unroll)), _BLOCK)


_lower = functools.partial(below, _TOP, header="ladder/gelu.cuh")
_scalar = functools.partial(_lower, "gelu_coalesced", functools.partial(_vectors, 1, 1), options=(1, 4, _BLOCK))
_wide = functools.partial(
    _lower, "gelu_coalesced", functools.partial(_vectors, _UNROLL, 4), options=(_UNROLL, 16, _BLOCK)
)


def _dims(rows: int, columns: int) -> Dims:
    return {"rows": rows, "columns": columns}


GELU = Ladder(
    name="gelu",
    title="Bias and GELU",
    dims=_dims(16384, 3072),
    odd_dims=(
        *(_dims(33, columns) for columns in (1, 2, 3)),  # not all values far below 0, see kernels/catalog/rows.py
        *(_dims(5, columns) for columns in (63, 64, 65, 127, 129, 1023)),
        *(_dims(rows, 96) for rows in (1, 3, 63, 129)),
    ),
    yardsticks={"torch": _TOP.reference, "torch.compile": _TOP.peers["torch.compile"], "torch, op by op": _eager},
    rungs=(
        Rung(
            name="naive",
            spec=_lower("gelu_naive", _runs, name="gelu_naive", options=(_RUN, _BLOCK), restrict=False),
            why="One thread per sixteen neighbouring elements: the lanes of a warp are 64 bytes apart.",
        ),
        Rung(
            name="coalesced",
            spec=_scalar(name="gelu_coalesced", restrict=False),
            why="One thread per element: a warp reads and writes one cache line at a time.",
        ),
        Rung(
            name="restrict",
            spec=_scalar(name="gelu_restrict"),
            why="__restrict__ promises that y overlaps nothing; with one element per thread no load follows a store.",
        ),
        Rung(
            name="unrolled",
            spec=_lower(
                "gelu_coalesced",
                functools.partial(_vectors, _UNROLL, 1),
                name="gelu_unrolled",
                options=(_UNROLL, 4, _BLOCK),
            ),
            why="Four elements per thread, a block apart: four loads are in flight before the first tanh.",
        ),
        Rung(
            name="float4",
            spec=_wide(name="gelu_float4"),
            why="16 bytes per load and store: a quarter of the instructions, and four times the bytes in flight.",
        ),
        Rung(
            name="constant bias",
            variant=True,
            spec=_wide(name="gelu_constant", **in_constant_memory(_TOP, "bias")),
            why="The bias in constant memory, which serves one address at a time, while 32 lanes need 32.",
        ),
        Rung(
            name="exp2",
            spec=_TOP,
            why="The production kernel: x / (1 + exp(-2u)) by two cheap instructions instead of tanhf.",
        ),
        Rung(
            name="fast tanh",
            variant=True,
            spec=_FAST,
            why="One approximate tanh instruction, relative error 2^-11: the kernel does not wait for arithmetic.",
        ),
    ),
)
