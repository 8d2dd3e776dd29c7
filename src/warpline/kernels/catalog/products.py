"""Matrix products and the ops fused with them: for one to eight rows, and for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from warpline.config import DTYPE_BYTES
from warpline.hardware import ARCH_LIMITS, arch_number
from warpline.kernels.arguments import CODES, STORAGE, Absent, Buffer, Dims, Scalar, matrix, reads, writes
from warpline.kernels.spec import THREADS_PER_WARP, KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    from torch import Tensor

#: Most rows for which a product is a read of the weights.
MOST_MATVEC_ROWS = 8


#: Suffix of the names of ops with int8 weights, and the dtypes in which they compute.
CODED, CODED_DTYPES = "_int8", ("fp16", "bf16")


def weights_of(left: Iterator[Tensor], like: Tensor, *, coded: bool) -> Tensor:
    """Return the next matrix of an op's inputs in the dtype of `like`; codes are multiplied by their scales."""
    weight = next(left)
    return weight.to(like.dtype) * next(left).to(like.dtype)[:, None] if coded else weight


def _reference(
    *, norm: bool, bias: bool, gelu: bool, residual: bool, coded: bool = False
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the reference: the product in torch, with the ops fused with it."""

    def reference(*inputs: Tensor, epsilon: float = 0.0) -> tuple[Tensor, ...]:
        from torch.nn import functional as F

        left = iter(inputs)
        x = next(left)
        if norm:
            x = F.layer_norm(x, x.shape[-1:], next(left), next(left), epsilon)
        weight = weights_of(left, x, coded=coded)
        y = F.linear(x, weight, next(left) if bias else None)
        if gelu:
            y = F.gelu(y, approximate="tanh")
        return (y + next(left) if residual else y,)

    return reference


def _fused_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Product by cuBLASLt with bias and GELU in its epilogue."""
    import torch

    return torch._addmm_activation(bias, x, weight.T, use_gelu=True)


def _vendor(*, gelu: bool) -> Callable[..., None]:
    """Return the product by cuBLASLt with bias, and in half precision GELU, in its epilogue."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> None:
        import torch

        if gelu and x.dtype != torch.float32:
            torch._addmm_activation(bias, x, weight.T, use_gelu=True, out=y)
            return
        torch.addmm(bias, x, weight.T, out=y)
        if gelu:
            torch.ops.aten.gelu.out(y, approximate="tanh", out=y)

    return run


def _optional(present: bool, name: str, dims: str) -> Buffer | Absent:
    return reads(name, dims) if present else Absent(name)


def product_flops(dims: Dims) -> int:
    """Return two operations per weight and row: a multiplication and an addition."""
    return 2 * dims["rows"] * dims["inputs"] * dims["outputs"]


# --- one to eight rows ------------------------------------------------------------------------------------------------

_MATVEC_TUNABLES = {"warps": (8, 4), "sharers": (1, 2, 4, 8), "outputs_each": (1, 2, 4, 8, 16), "unroll": (4, 2, 8)}
#: Outputs per warp that select tensor cores.
_TILES = (8, 16)
#: Least outputs for tiles of 16: with fewer, twice as many tiles of 8 keep more of a GPU reading.
_LEAST_FOR_SIXTEEN = 16384


def _fits_tensor_cores(dims: Dims, dtype: str, *, coded: bool) -> bool:
    """Whether rows are whole 16-byte vectors of weights, in a type that tensor cores multiply."""
    return dtype != "fp32" and dims["inputs"] % (16 if coded else 8) == 0


def on_tensor_cores(dims: Dims, dtype: str, *, coded: bool) -> bool:
    """Whether a product of few rows uses tensor cores. One row leaves them mostly idle, but codes are converted in
    pairs there, which takes fewer instructions than one by one."""
    return (coded or dims["rows"] > 1) and _fits_tensor_cores(dims, dtype, coded=coded)


def _matvec_defaults(dims: Dims, dtype: str, *, norm: bool, coded: bool) -> Tunables:
    """Return the defaults: several warps share an output where there are few, so that they fill a GPU. For plain
    weights they are rules made from sweeps on an H200, in a chain of overlapping launches."""
    rows, outputs, inputs = dims["rows"], dims["outputs"], dims["inputs"]

    def sharers(wanted: int, least: int) -> int:
        """Return the warps per output: until outputs times sharers reach `wanted`, or each has under `least` inputs."""
        return next(n for n in (1, 2, 4, 8) if n == 8 or outputs * n >= wanted or inputs < least * n)

    if on_tensor_cores(dims, dtype, coded=coded):
        if coded:
            n, each = sharers(65536, 128), 16 if outputs >= _LEAST_FOR_SIXTEEN else 8
            long = inputs > 256 * n and each == 8 and rows <= 4  # then registers suffice
            return {"warps": 8, "sharers": n, "outputs_each": each, "unroll": 8 if long else 4}
        if not norm and max(outputs, inputs) <= 1024:
            return {"warps": 8, "sharers": 8, "outputs_each": 16, "unroll": 2}
        n = sharers(65536, 256)
        # All loads at once where they fit into a warp's registers.
        return {"warps": 8, "sharers": n, "outputs_each": 16, "unroll": 8 if inputs <= 256 * n else 4}
    if rows > 4:
        return {"warps": 4, "sharers": min(4, max(2, sharers(2048, 512))), "outputs_each": 4, "unroll": 2}
    if rows == 1 and not coded:
        if norm and outputs <= 4096:  # few blocks, since each normalises x itself
            return {"warps": 8, "sharers": 4 if dtype == "fp32" else 1, "outputs_each": 4, "unroll": 4}
        if not norm and dtype != "fp32":
            if outputs < 1024 and inputs >= 2048:
                return {"warps": 8, "sharers": 4, "outputs_each": 1, "unroll": 2}
            return {"warps": 4, "sharers": 1, "outputs_each": 1, "unroll": 8}
    return {"warps": 8, "sharers": sharers(2048, 512), "outputs_each": 2 if rows > 2 else 1, "unroll": 4}


def matvec_allows(dims: Dims, tunables: Tunables, dtype: str, *, coded: bool) -> bool:
    """Whether tiles of outputs fit tensor cores; in ordinary arithmetic, whether a lane ends with one sum at most."""
    each, rows = tunables["outputs_each"], 1 << (dims["rows"] - 1).bit_length()
    if tunables.get("sharers", 1) > tunables["warps"]:
        return False
    return _fits_tensor_cores(dims, dtype, coded=coded) if each in _TILES else each * rows <= THREADS_PER_WARP


def row_pitch(inputs: int) -> int:
    """Return ROW_PITCH of ops/matvec.cuh."""
    return -(-inputs // 64) * 64 + 32


def _matvec_launch(norm: bool) -> Callable[[Dims, Tunables, str], Launch]:
    def launch(dims: Dims, tunables: Tunables, dtype: str) -> Launch:
        per_block = tunables["warps"] // tunables["sharers"] * tunables["outputs_each"]
        shared = dims["rows"] * row_pitch(dims["inputs"]) * DTYPE_BYTES[dtype] if norm else 0
        return Launch(-(-dims["outputs"] // per_block), tunables["warps"] * THREADS_PER_WARP, shared)

    return launch


def shapes(listed: list[tuple[int, int, int]]) -> tuple[Dims, ...]:
    """Return dimensions by name from (rows, outputs, inputs)."""
    return tuple({"rows": rows, "outputs": outputs, "inputs": inputs} for rows, outputs, inputs in listed)


#: Shapes for codes: rows that are whole vectors of x but not of codes, or too short for all lanes of a warp.
_CODED = [(3, 100, 72), (1, 50, 16), (5, 33, 48), (1, 1600, 1600), (8, 2000, 80)]
_ODD = [(2, n, n) for n in (1, 2, 3, 63, 65, 127, 129, 1023)] + [(3, 1024, 64), (1, 128, 1024)]


def _matvec(name: str, summary: str, *, coded: bool, norm: bool = False, bias: bool = False, gelu: bool = False,
            residual: bool = False, bench: list[tuple[int, int, int]]) -> KernelSpec:  # fmt: skip
    return KernelSpec(
        name=name + CODED * coded,
        summary=summary + ", of int8 weights" * coded,
        header="ops/matvec.cuh",
        awaits=True,
        function="matvec",
        arguments=(
            reads("x", "rows inputs"),
            _optional(norm, "gamma", "inputs"),
            _optional(norm, "beta", "inputs"),
            *matrix("weight", "outputs inputs", coded=coded),
            _optional(bias, "bias", "outputs"),
            _optional(residual, "residual", "rows outputs"),
            writes("y", "rows outputs"),
            Scalar("epsilon", 1e-5) if norm else Absent("epsilon", "0.f"),
        ),
        types=(CODES if coded else STORAGE,),
        constants=("outputs", "inputs", "rows"),
        options=(int(gelu),),
        tunables=_MATVEC_TUNABLES,
        allows=partial(matvec_allows, coded=coded),
        default=lambda dims, dtype, _arch: _matvec_defaults(dims, dtype, norm=norm, coded=coded),
        launch=_matvec_launch(norm),
        flops=product_flops,
        reference=_reference(norm=norm, bias=bias, gelu=gelu, residual=residual, coded=coded),
        dtypes=CODED_DTYPES if coded else tuple(DTYPE_BYTES),
        test_dims=shapes(
            [
                *((rows, 768, 768) for rows in range(1, MOST_MATVEC_ROWS + 1)),
                (8, 192, 3072),
                *_ODD,
                *(_CODED if coded else ()),
            ]
        ),
        bench_dims=shapes(bench),
    )


def _with_coded(name: str, summary: str, **options: Any) -> tuple[KernelSpec, KernelSpec]:
    """Return the op, and the same with int8 weights."""
    return _matvec(name, summary, coded=False, **options), _matvec(name, summary, coded=True, **options)


MATVECS = (
    *_with_coded("matvec", "matrix times 1 to 8 rows", bench=[(1, 50257, 768), (8, 50257, 768), (1, 50257, 1600)]),
    *_with_coded(
        "layernorm_matvec_bias",
        "LayerNorm, matrix times 1 to 8 rows, bias",
        norm=True,
        bias=True,
        bench=[(1, 2304, 768), (8, 2304, 768), (1, 4800, 1600)],
    ),
    *_with_coded(
        "layernorm_matvec_bias_gelu",
        "LayerNorm, matrix times 1 to 8 rows, bias, GELU",
        norm=True,
        bias=True,
        gelu=True,
        bench=[(1, 3072, 768), (8, 3072, 768), (1, 6400, 1600)],
    ),
    *_with_coded(
        "matvec_bias_residual",
        "matrix times 1 to 8 rows, bias, residual",
        bias=True,
        residual=True,
        bench=[(1, 768, 768), (8, 768, 768), (1, 768, 3072), (8, 768, 3072), (1, 1600, 6400)],
    ),
)


# --- many rows --------------------------------------------------------------------------------------------------------

_MATMUL_TUNABLES = {
    "tile_m": (128, 64, 256, 16, 32),
    "tile_n": (128, 64, 96, 192, 256, 16, 32),
    "tile_k": (64, 16, 32, 128),
    "warps_m": (2, 1, 4),
    "warps_n": (4, 2, 1),
    "warps_k": (1, 2, 4),
    "splits": (1, 2, 4),
    "stages": (3, 2, 4, 5, 6, 7),
}
#: Most rows for which a product is mostly a read of the weights.
_FEW_ROWS = 256


def _matmul_defaults(dims: Dims, dtype: str, arch: str) -> Tunables:
    def choice(*values: int) -> Tunables:
        return dict(zip(_MATMUL_TUNABLES, values, strict=True))

    def tiles(m: int, n: int) -> int:
        return -(-dims["rows"] // m) * -(-dims["outputs"] // n)

    if dtype == "fp32":
        if dims["rows"] <= _FEW_ROWS:
            return choice(*((16, 32, 64) if tiles(64, 64) < 64 else (64, 64, 32)), 2, 4, 2, 1, 2)
        if tiles(128, 96) < 192:
            return choice(64, 64, 32, 2, 4, 1, 1, 2)
        return choice(128, 96, 16, 2, 4, 1, 1, 2) if tiles(128, 96) < 1024 else choice(128, 64, 16, 2, 4, 1, 1, 2)
    if arch_number(arch) < 80:
        return choice(128, 128, 32, 2, 4, 1, 1, 2)
    if dims["rows"] <= _FEW_ROWS:
        return choice(*_small_tile(dims, arch))
    if tiles(128, 192) >= 96 and _is_roomy(arch):
        return choice(128, 192, 64, 2, 4, 1, 1, 3)
    return choice(64, 96, 64, 2, 2, 1, 1, 4) if tiles(64, 96) >= 96 else choice(64, 64, 64, 2, 2, 1, 1, 4)


def _matmul_invariant(dims: Dims, dtype: str, arch: str) -> Tunables:
    """Return tunables with one running sum over the inputs, whatever the tile. Warps that would share the inputs share
    the outputs instead."""
    chosen = dict(_matmul_defaults(dims, dtype, arch))
    if dtype != "fp32" and chosen["warps_k"] > 1 and dims["outputs"] > 16384:
        warps = chosen["warps_n"] * chosen["warps_k"]
        chosen |= {"tile_n": max(chosen["tile_n"], 32 * warps), "warps_n": warps, "tile_k": 64}
    return {**chosen, "warps_k": 1, "splits": 1}


def _is_roomy(arch: str) -> bool:
    """Whether there is shared memory for large tiles."""
    return arch_number(arch) in (80, 90, 100)


def _small_tile(dims: Dims, arch: str) -> tuple[int, ...]:
    """Return the fastest tile on an H200 for GPT-2's products: enough tiles to keep all SMs reading, as many of their
    inputs in flight as shared memory holds, and clusters that share long products of few outputs."""
    rows, outputs, inputs = dims["rows"], dims["outputs"], dims["inputs"]
    roomy = _is_roomy(arch)
    if outputs > 16384:
        if rows <= 16:
            return 16, 64, 128, 1, 2, 2, 1, 4
        if rows > 64 and roomy:
            return 128, 192, 64, 2, 4, 1, 1, 3
        return (64, 128, 64, 2, 4, 1, 1, 4) if roomy else (64, 96, 64, 2, 2, 1, 1, 4)
    if arch_number(arch) >= 90 and outputs <= 1024 < inputs:
        if rows <= 16:
            return 16, 64, 128, 1, 4, 2, 4, 6 if roomy else 4
        return (
            (32, 64, 128, 2, 2, 2, 4, 6 if roomy else 3) if rows <= 64 else (64, 64, 64, 2, 2, 2, 4, 6 if roomy else 4)
        )
    if rows <= 16:
        return 16, 32, 128, 1, 2, 4, 1, 6
    if rows <= 64 and outputs <= 1024:
        return 32, 32, 128, 2, 1, 4, 1, 7 if roomy else 5
    if rows <= 64 or outputs <= 1024:
        return 32, 64, 128, 2, 2, 2, 1, 6 if roomy else 3
    return 64, 96, 64, 2, 2, 2, 1, 6 if roomy else 4


def _matmul_allows(dims: Dims, tunables: Tunables, dtype: str) -> bool:
    """Whether each warp has whole pairs of fragments and whole slices (in fp32, whether a tile fits 16 x 16 threads),
    and some GPU has enough shared memory."""
    m, n, k, warps_m, warps_n, warps_k, _, _ = (tunables[name] for name in _MATMUL_TUNABLES)
    if _matmul_launch(dims, tunables, dtype).shared_bytes > max(a.block_shared_bytes for a in ARCH_LIMITS.values()):
        return False
    if dtype == "fp32":
        return warps_m * warps_n == 8 and k % (8 * warps_k) == 0 and warps_k <= 2
    return m % (16 * warps_m) == 0 and n % (16 * warps_n) == 0 and k % (32 * warps_k) == 0


def _matmul_launch(dims: Dims, tunables: Tunables, dtype: str) -> Launch:
    m, n, k, warps_m, warps_n, warps_k, splits, stages = (tunables[name] for name in _MATMUL_TUNABLES)
    size = DTYPE_BYTES[dtype]
    ring = stages * (m + n) * (k * size + 16)
    result = m * (n * size + 16)
    sums = 4 * m * n * warps_k if warps_k * splits > 1 else 0
    tiles = -(-dims["rows"] // m) * -(-dims["outputs"] // n)
    return Launch(tiles * splits, warps_m * warps_n * warps_k * THREADS_PER_WARP, max(ring, result, sums), splits)


def _matmul(name: str, summary: str, *, bias: bool = False, gelu: bool = False, residual: bool = False,
            bench: list[tuple[int, int, int]]) -> KernelSpec:  # fmt: skip
    return KernelSpec(
        name=name,
        summary=summary,
        header="ops/matmul.cuh",
        awaits=True,
        function="matmul",
        arguments=(
            reads("x", "rows inputs"),
            reads("weight", "outputs inputs"),
            _optional(bias, "bias", "outputs"),
            _optional(residual, "residual", "rows outputs"),
            writes("y", "rows outputs"),
            Scalar("rows"),
        ),
        constants=("outputs", "inputs"),
        options=(int(gelu),),
        tunables=_MATMUL_TUNABLES,
        default=_matmul_defaults,
        invariant=_matmul_invariant,
        launch=_matmul_launch,
        flops=product_flops,
        reference=_reference(norm=False, bias=bias, gelu=gelu, residual=residual),
        peers={"cuBLASLt": _fused_gelu} if gelu else {},
        vendor=_vendor(gelu=gelu) if bias and not residual else None,
        allows=_matmul_allows,
        test_dims=shapes(
            [*((rows, 768, 768) for rows in (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1023)), (129, 1023, 129), *_ODD]
        ),
        bench_dims=shapes(bench),
    )


MATMULS = (
    _matmul("matmul", "matrix product", bench=[(64, 50257, 768), (1024, 3072, 768), (16384, 3072, 768)]),
    _matmul(
        "matmul_bias",
        "matrix product, bias",
        bias=True,
        bench=[
            # Products that the engine computes with this kernel in a step of a batch: QKV and both projections.
            *((rows, *shape) for rows in (16, 64, 128) for shape in ((2304, 768), (768, 768), (768, 3072))),
            (1024, 2304, 768),
            (16384, 2304, 768),
        ],
    ),
    _matmul(
        "matmul_bias_gelu",
        "matrix product, bias, GELU",
        bias=True,
        gelu=True,
        bench=[*((rows, 3072, 768) for rows in (16, 64, 128, 1024, 16384))],
    ),
    _matmul(
        "matmul_bias_residual",
        "matrix product, bias, residual",
        bias=True,
        residual=True,
        bench=[(1024, 768, 768), (1024, 768, 3072), (16384, 768, 3072)],
    ),
)
