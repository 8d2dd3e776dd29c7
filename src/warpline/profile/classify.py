"""Classifies a kernel or an operator by its name: GEMM, attention, reduction, elementwise, memory, or exchange, where
the blocks of one kernel wait for each other's results. A name that no rule matches is "other"; it is listed, not
guessed. Needs no torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from warpline.profile.session import KernelRow, Phase

CLASSES = ("GEMM", "attention", "reduction", "elementwise", "memory", "exchange", "other")

#: Our own kernels, classified by what most of their time goes to.
_OURS = {
    # "gathered", "multiplied", "computed" are stages of the persistent kernel
    "exchange": r"gathered(?!, computed)|agreed on|awaited",
    "GEMM": r"matvec|matmul|head_argmax|products|multiplied|cpu_decode|cpu_prefill",
    "attention": r"attention|computed",
    "reduction": r"layernorm|softmax|sample|row_statistics",
    "elementwise": r"gelu|append_token|noise",
    "memory": r"embedding|last_rows|quantise_kv|admit|report|expand",
}
#: Operators of torch on the host; a rule matches the whole name.
_OPERATORS = {
    "GEMM": r"mm|bmm|addmm_?|baddbmm|matmul|linear|einsum|mv|addmv_?|dot|_?addmm_activation|mkldnn_linear|"
    r"_mkl_linear|_linear_pointwise",
    "attention": r"_?scaled_dot_product.*|_(flash|efficient|cudnn)_attention.*|_?native_multi_head_attention",
    "reduction": r"(native_)?layer_norm|_?(log_)?softmax|sum|mean|var|var_mean|std|norm|max|min|amax|amin|"
    r"argmax|argmin|any|all|cumsum|topk|sort|prod|isfinite|_is_all_true|_local_scalar_dense|item|is_nonzero|equal|logsumexp",
    "elementwise": r"(add|sub|rsub|mul|div|pow|tanh|exp|log|neg|abs|sqrt|rsqrt|gelu|relu|silu|sigmoid|where|"
    r"masked_fill|maximum|minimum|clamp.*|eq|ne|lt|le|gt|ge|logical_.*|bitwise_.*|__.*__|floor_divide|remainder|tril|triu)_?",
    "memory": r"(copy|clone|contiguous|to|_to_copy|cat|stack|index|index_select|index_put|_index_put_impl|gather|"
    r"scatter.*|embedding|view|_unsafe_view|reshape|_reshape_alias|transpose|permute|t|expand|as_strided|slice|select|"
    r"narrow|split.*|chunk|unsqueeze|squeeze|flatten|unflatten|empty.*|new_.*|zeros.*|ones.*|full.*|fill|zero|arange|"
    r"lift_fresh|alias|detach|resolve_.*|repeat.*|resize|set|numpy_T|pad|constant_pad_nd|index_copy|scalar_tensor|"
    r"_pin_memory|unbind)_?",
}
#: Kernels of other libraries on a GPU; the first rule that matches a part of the name counts.
_KERNELS = (
    ("reduction", r"^triton_(red|per)_|cpp_fused.*(norm|softmax|argmax)"),
    ("elementwise", r"^triton_poi_|cpp_fused"),
    ("memory", r"^Memcpy|^Memset|^memcpy|^memset|^detach$"),
    ("attention", r"flash|fmha|attention|sdpa|mha_"),
    ("GEMM", r"gemm|gemv|cutlass|wgmma|sgemm|xmma|cublas|splitK|dot_kernel|_mm_|\bnvjet"),
    (
        "reduction",
        r"layer_norm|layernorm|softmax|reduce|argmax|norm_kernel|cub::.*(Scan|Sort)|topk|sort",
    ),
    ("memory", r"copy|Copy|CatArray|gather|scatter|index|Index|embedding|transpose|fill|Fill|arange"),
    ("elementwise", r"elementwise|gelu|where|compare|binary|unary|pointwise"),
)
#: The form of operator names, library::operator; names of kernels have more colons, brackets or spaces.
_HOST = re.compile(r"[a-z_]+::\w+(\.\w+)?")


@functools.cache
def classify(name: str) -> str:
    """Return the class of a kernel or an operator. Cached, because the same few names are asked again and again."""
    if name.startswith("warpline_"):
        return next((kind for kind, rule in _OURS.items() if re.search(rule, name)), "other")
    if _HOST.fullmatch(name):
        operator = name.split("::", 1)[1]
        return next((kind for kind, rule in _OPERATORS.items() if re.fullmatch(rule, operator)), "other")
    return next((kind for kind, rule in _KERNELS if re.search(rule, name)), "other")


@dataclass(frozen=True, slots=True)
class ClassRow:
    """Time of one class in a phase, per step."""

    kind: str
    us: float
    calls: float
    share: float
    names: tuple[str, ...]


def classes(phase: Phase) -> list[ClassRow]:
    """Return the time per class, the longest first."""
    groups: dict[str, list[KernelRow]] = {}
    for row in phase.kernels:
        groups.setdefault(classify(row.name), []).append(row)
    whole = sum(row.us for row in phase.kernels) or 1.0
    rows = [
        ClassRow(kind, us, sum(r.calls for r in rows), us / whole, _names(rows))
        for kind, rows in groups.items()
        for us in (sum(r.us for r in rows),)
    ]
    return sorted(rows, key=lambda row: -row.us)


def unknown(phase: Phase) -> list[str]:
    """Return the names that could not be classified."""
    return list(_names(row for row in phase.kernels if classify(row.name) == "other"))


def _names(rows: Iterable[KernelRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.name for row in rows))
