"""The catalog of all ops that are launched: one `KernelSpec` per op."""

from __future__ import annotations

from warpline.errors import one_of
from warpline.kernels.catalog import attention, group, products, prompts, rows, state, tokens
from warpline.kernels.spec import KernelSpec

CATALOG: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        rows.EMBEDDING,
        *rows.NEWEST_EMBEDDINGS,
        *rows.PROMPT_EMBEDDINGS,
        rows.EXPAND,
        rows.LAYERNORM,
        rows.RESIDUAL_LAYERNORM,
        rows.LAST_ROWS,
        rows.GELU,
        rows.BIAS_GELU,
        rows.BIAS_GELU_FAST,
        rows.SOFTMAX,
        *products.MATVECS,
        *products.MATMULS,
        group.ROW_STATISTICS,
        *group.GROUP_MATMULS,
        attention.FLASH_ATTENTION,
        prompts.QUANTISE_KV,
        prompts.PROMPT_ATTENTION,
        prompts.PROMPT_ATTENTION_INT8,
        attention.DECODE_ATTENTION,
        attention.APPEND_ATTENTION,
        attention.APPEND_ATTENTION_INT8,
        *tokens.HEAD_ARGMAXES,
        tokens.SAMPLE,
        state.APPEND_TOKEN,
        state.ADMIT,
        state.REPORT,
    )
}


def find(name: str) -> KernelSpec:
    """Return the spec called `name`; the error for an unknown name suggests the nearest."""
    return CATALOG[one_of(name, CATALOG, "kernel")]
