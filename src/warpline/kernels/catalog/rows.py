"""Ops that read and write memory once: LayerNorm, softmax, GELU, embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warpline.config import DTYPE_BYTES
from warpline.kernels.arguments import (
    CODES,
    HALF,
    SCALES,
    STORAGE,
    Absent,
    Buffer,
    Dims,
    Scalar,
    count_of,
    distinct,
    index_into,
    matrix,
    reads,
    writes,
)
from warpline.kernels.catalog.products import CODED, CODED_DTYPES
from warpline.kernels.spec import THREADS_PER_WARP, KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    from torch import Tensor


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    from torch.nn import functional as F

    return (F.layer_norm(x, x.shape[-1:], weight, bias, epsilon),)


def _residual_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, ...]:
    total = x + residual
    return total, *_layernorm(total, weight, bias, epsilon)


def _gelu(x: Tensor) -> tuple[Tensor, ...]:
    from torch.nn import functional as F

    return (F.gelu(x, approximate="tanh"),)


def _bias_gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return _gelu(x + bias)


def _compiled_bias_gelu(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return _compiled()(x, bias)  # type: ignore[no-any-return]


@functools.cache
def _compiled() -> Any:
    import torch

    return torch.compile(_bias_gelu)


def _softmax(x: Tensor) -> tuple[Tensor, ...]:
    return (x.softmax(dim=-1),)


def _newest(tokens: Tensor, length: Tensor, lanes: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
    return _prompts(tokens, lanes, length[lanes] - 1, *matrices)


def _prompts(tokens: Tensor, row_slots: Tensor, row_positions: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
    ids, (wte, *scale, wpe) = tokens[row_slots, row_positions], matrices
    token = wte[ids].to(wpe.dtype) * scale[0][ids, None].to(wpe.dtype) if scale else wte[ids]
    return (token + wpe[row_positions],)


def _expand(codes: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (codes * scale[:, None],)


def _last(x: Tensor, residual: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    return x[last], residual[last]


def _embedding(ids: Tensor, positions: Tensor, wte: Tensor, wpe: Tensor) -> tuple[Tensor, ...]:
    return (wte[ids] + wpe[positions],)


def _row_warps(dims: Dims) -> int:
    """Return the warps that share a row: as few as keep a lane's part of it in a moderate number of registers."""
    return next(warps for warps in (1, 2, 4, 8) if warps == 8 or dims["columns"] <= warps * THREADS_PER_WARP * 24)


def _row_defaults(dims: Dims, _dtype: str, _arch: str) -> Tunables:
    # Small blocks: a group of warps that has ended frees room at once. 256 is 7 % slower at 1,600 columns.
    row_warps = _row_warps(dims)
    return {"block": max(128, row_warps * THREADS_PER_WARP), "row_warps": row_warps}


def _embedding_defaults(dims: Dims, dtype: str, arch: str) -> Tunables:
    # Rows are scattered, so many bytes must be in flight; in fp32 more lanes per row do that.
    usual = _row_defaults(dims, dtype, arch)
    return {**usual, "row_warps": max(4, usual["row_warps"])} if dtype == "fp32" else usual


def _flat_defaults(dims: Dims, dtype: str, _arch: str) -> Tunables:
    # Small blocks with one vector per thread; where there is little work, narrow vectors for more threads.
    few = dims["rows"] * dims["columns"] * DTYPE_BYTES[dtype] <= 1 << 17
    return {"block": 128, "unroll": 1, "bytes": 4 if few else 16}


def _one_row_per_group(dims: Dims, tunables: Tunables, _dtype: str) -> Launch:
    rows_per_block = tunables["block"] // (tunables["row_warps"] * THREADS_PER_WARP)
    return Launch(-(-dims["rows"] // rows_per_block), tunables["block"])


def _flat(dims: Dims, tunables: Tunables, dtype: str) -> Launch:
    """Return a launch with vectors as wide as the tunables and every row allow: `vector_width` of common.cuh."""
    size = DTYPE_BYTES[dtype]
    width = next(w for w in (8, 4, 2, 1) if w * size <= tunables["bytes"] and dims["columns"] % w == 0)
    vectors = dims["rows"] * dims["columns"] // width
    return Launch(-(-vectors // (tunables["block"] * tunables["unroll"])), tunables["block"])


_ROW_TUNABLES = {"block": (128, 256, 512, 1024), "row_warps": (1, 2, 4, 8)}
_FLAT_TUNABLES = {"block": (128, 256, 512), "unroll": (1, 2, 4, 8), "bytes": (16, 8, 4)}
_ODD = (1, 2, 3, 63, 64, 65, 127, 128, 129, 1023, 1024)


def _tests(*columns: int, **fixed: int) -> tuple[Dims, ...]:
    """Return few and many rows of a usual width, and some rows of every odd width: more where columns are few, because
    errors are compared with the largest value, and where all are far below 0 GELU is all cancellation."""
    usual = [{"rows": rows, "columns": 768} for rows in (1, 2, 3, 7, 8, 9, 63, 65, 128)]
    odd = [{"rows": 33 if width < 8 else 5, "columns": width} for width in (*_ODD, *columns)]
    return tuple({**dims, **fixed} for dims in (*usual, *odd))


def _bench(*columns: int, **fixed: int) -> tuple[Dims, ...]:
    shapes = [(rows, columns[0]) for rows in (1, 64, 1024, 16384, 65536)] + [(65536, width) for width in columns[1:]]
    return tuple({"rows": rows, "columns": width, **fixed} for rows, width in shapes)


#: Specs of ops that hold rows in registers, and of ops that process elements one by one.
_row_op = functools.partial(
    KernelSpec,
    constants=("columns",),
    tunables=_ROW_TUNABLES,
    default=_row_defaults,
    allows=lambda _dims, tunables, _dtype: tunables["row_warps"] * THREADS_PER_WARP <= tunables["block"],
    launch=_one_row_per_group,
)
_flat_op = functools.partial(
    KernelSpec,
    constants=("columns",),
    tunables=_FLAT_TUNABLES,
    default=_flat_defaults,
    launch=_flat,
)

LAYERNORM = _row_op(
    name="layernorm",
    summary="LayerNorm of rows, one pass over memory",
    header="ops/layernorm.cuh",
    arguments=(
        reads("x", "rows columns"),
        reads("weight", "columns"),
        reads("bias", "columns"),
        writes("y", "rows columns"),
        Scalar("rows"),
        Scalar("epsilon", 1e-5),
    ),
    flops=lambda dims: 8 * dims["rows"] * dims["columns"],
    reference=_layernorm,
    test_dims=_tests(256, 1280, 1600, 4097),
    bench_dims=_bench(768, 1600),
)

RESIDUAL_LAYERNORM = _row_op(
    name="residual_layernorm",
    summary="residual addition and LayerNorm of the sum; stores both",
    header="ops/layernorm.cuh",
    arguments=(
        reads("x", "rows columns"),
        reads("residual", "rows columns"),
        reads("weight", "columns"),
        reads("bias", "columns"),
        writes("sum", "rows columns"),
        writes("y", "rows columns"),
        Scalar("rows"),
        Scalar("epsilon", 1e-5),
    ),
    flops=lambda dims: 9 * dims["rows"] * dims["columns"],
    reference=_residual_layernorm,
    test_dims=_tests(256, 1280, 1600, 4097),
    bench_dims=_bench(768, 1600),
)

SOFTMAX = _row_op(
    name="softmax",
    summary="softmax of rows, in float32",
    header="ops/softmax.cuh",
    arguments=(reads("x", "rows columns"), writes("y", "rows columns"), Scalar("rows")),
    flops=lambda dims: 5 * dims["rows"] * dims["columns"],
    reference=_softmax,
    test_dims=_tests(256, 4097),
    bench_dims=_bench(1024),
)


def _gelu_op(name: str, summary: str, *, bias: bool, fast: bool = False) -> KernelSpec:
    bias_argument: Buffer | Absent = reads("bias", "columns") if bias else Absent("bias")
    return _flat_op(
        name=name,
        summary=summary,
        header="ops/gelu.cuh",
        function="gelu",
        options=(int(fast),),
        arguments=(reads("x", "rows columns"), bias_argument, writes("y", "rows columns"), Scalar("rows")),
        flops=lambda dims: 9 * dims["rows"] * dims["columns"],
        reference=_bias_gelu if bias else _gelu,
        peers={"torch": _bias_gelu, "torch.compile": _compiled_bias_gelu} if bias else {},
        approximation=2**-10 if fast else 0.0,
        test_dims=_tests(3072),
        bench_dims=_bench(3072),
    )


GELU = _gelu_op("gelu", "GELU, tanh form", bias=False)
BIAS_GELU = _gelu_op("bias_gelu", "bias and GELU, tanh form", bias=True)
BIAS_GELU_FAST = _gelu_op("bias_gelu_fast", "bias and GELU with the hardware's approximate tanh", bias=True, fast=True)

EMBEDDING = _row_op(
    name="embedding",
    summary="token embedding plus position embedding",
    header="ops/embedding.cuh",
    arguments=(
        reads("ids", "rows", index_into("vocab")),
        reads("positions", "rows", index_into("places")),
        reads("wte", "vocab columns", touched="rows columns"),
        reads("wpe", "places columns", touched="rows columns"),
        writes("y", "rows columns"),
        Scalar("rows"),
    ),
    flops=lambda dims: dims["rows"] * dims["columns"],
    reference=_embedding,
    default=_embedding_defaults,
    test_dims=_tests(1600, vocab=50, places=33),
    bench_dims=_bench(768, vocab=50257, places=1024),
)


def _embedding_of_slots(
    name: str, summary: str, rows: tuple[Buffer, ...], *, coded: bool, reference: Callable[..., tuple[Tensor, ...]],
    tests: tuple[Dims, ...], bench: tuple[Dims, ...],
) -> KernelSpec:  # fmt: skip
    """Return the spec of an embedding of tokens in slots; `rows` are the arguments that select them."""
    return _row_op(
        name=name + CODED * coded,
        summary=summary + ", of int8 weights" * coded,
        header="ops/embedding.cuh",
        function=name,
        arguments=(
            reads("tokens", "slots capacity", index_into("vocab"), touched="rows 1"),
            *rows,
            *matrix("wte", "vocab columns", coded=coded, touched="rows columns"),
            reads("wpe", "places columns", touched="rows columns"),
            writes("y", "rows columns"),
            Scalar("rows"),
            Scalar("capacity"),
        ),
        types=(CODES if coded else STORAGE,),
        flops=lambda dims: dims["rows"] * dims["columns"],
        reference=reference,
        default=_embedding_defaults,
        dtypes=CODED_DTYPES if coded else tuple(DTYPE_BYTES),
        test_dims=tests,
        bench_dims=bench,
    )


NEWEST_EMBEDDINGS = tuple(
    _embedding_of_slots(
        "newest_embedding",
        "token plus position embedding of the newest token of each lane's slot",
        (
            reads("length", "slots", count_of("places"), touched="rows"),
            reads("lanes", "rows", distinct("rows", "slots")),
        ),
        coded=coded,
        reference=_newest,
        tests=_tests(1600, vocab=50, places=33, capacity=40, slots=130),
        bench=tuple(
            {"rows": rows, "columns": 768, "vocab": 50257, "places": 1024, "capacity": 1024, "slots": rows + 1}
            for rows in (1, 8, 64, 256)
        ),
    )
    for coded in (False, True)
)

PROMPT_EMBEDDINGS = tuple(
    _embedding_of_slots(
        "prompt_embedding",
        "token plus position embedding of packed prompts: of any positions of any slots",
        (reads("row_slots", "rows", index_into("slots")), reads("row_positions", "rows", index_into("capacity"))),
        coded=coded,
        reference=_prompts,
        tests=_tests(1600, vocab=50, places=43, capacity=40, slots=5),
        bench=tuple(
            {"rows": rows, "columns": 768, "vocab": 50257, "places": 1024, "capacity": 1024, "slots": 17}
            for rows in (128, 1024, 16384)
        ),
    )
    for coded in (False, True)
)

EXPAND = _flat_op(
    name="expand",
    summary="int8 weights as plain numbers, for products of many rows",
    header="ops/expand.cuh",
    makes_weights=True,
    arguments=(
        reads("codes", "rows columns", CODES),
        reads("scale", "rows", SCALES),
        writes("y", "rows columns", HALF),
        Scalar("rows"),
    ),
    flops=lambda dims: dims["rows"] * dims["columns"],
    reference=_expand,
    dtypes=("fp16",),  # the dtype of activations with codes
    test_dims=_tests(1600, 6400),
    bench_dims=tuple(
        {"rows": rows, "columns": columns} for rows, columns in ((2304, 768), (50257, 768), (6400, 1600), (1600, 6400))
    ),
)

LAST_ROWS = _row_op(
    name="last_rows",
    summary="gathers the last row of each lane from two tensors",
    header="ops/last_rows.cuh",
    arguments=(
        reads("x", "rows columns", touched="lanes columns"),
        reads("residual", "rows columns", touched="lanes columns"),
        reads("last", "lanes", index_into("rows")),
        writes("last_x", "lanes columns"),
        writes("last_residual", "lanes columns"),
        Scalar("lanes"),
    ),
    flops=lambda _dims: 0,
    reference=_last,
    launch=lambda dims, tunables, dtype: _one_row_per_group({"rows": dims["lanes"]}, tunables, dtype),
    test_dims=(*_tests(1600, lanes=9), *({"rows": 30, "columns": 96, "lanes": lanes} for lanes in (1, 2, 64, 65))),
    bench_dims=({"rows": 128, "columns": 768, "lanes": 1}, {"rows": 16384, "columns": 768, "lanes": 16}),
)
