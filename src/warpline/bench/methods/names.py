"""The names of the methods, for code that must not wait for torch."""

from __future__ import annotations

#: Every method and its home; loaded when chosen. Rows come in this order, ours as it is used before all others.
METHODS = {
    "warpline": "ours:OnLLM",
    "warpline-int8": "ours:OnLLMInt8",
    "warpline-int8-kv": "kv_codes:OnLLMInt8Kv",
    "naive": "ours:Naive",
    "naive-compile": "ours:NaiveCompiled",
    "torch": "ours:OnTorch",
    "torch-compile": "ours:OnTorchCompiled",
    "cpu": "ours:OnCpu",
    "cpu-int8": "ours:OnCpuInt8",
    "kernels": "ours:OnKernels",
    "graph": "ours:OnGraph",
    "graph-int8": "ours:OnGraphInt8",
    "graph-int8-kv": "kv_codes:OnGraphInt8Kv",
    "persistent": "ours:OnPersistent",
    "persistent-int8": "ours:OnPersistentInt8",
    "hf-eager": "hf:Eager",
    "hf-sdpa": "hf:Sdpa",
    "hf-static-compile": "hf:StaticCompiled",
    "static-kv": "static_kv:StaticKV",
    "static-kv-graph": "static_kv:StaticKVGraph",
    "static-kv-compile": "static_kv:StaticKVCompiled",
    "static-kv-compile-int8": "static_kv:StaticKVCompiledInt8",
    "ctranslate2": "ct2:CTranslate2",
    "ctranslate2-int8": "ct2:CTranslate2Int8",
    "onnxruntime": "ort:OnnxRuntime",
}

#: What a user calls, and what all are compared with where it was measured.
HEADLINE, BASELINE = "warpline", "naive"
#: What a user calls, with weights of either kind.
CALLED = (HEADLINE, "warpline-int8")
#: Those with int8 weights; `--dtype int8` means them.
INT8 = (
    "warpline-int8", "cpu-int8", "graph-int8", "persistent-int8", "static-kv-compile-int8", "ctranslate2-int8",
)  # fmt: skip
#: Those whose KV cache holds int8 codes: beside the others, and compared with none of them.
INT8_KV = ("warpline-int8-kv", "graph-int8-kv")
#: The model as one writes it first: what others are compared with, and no peer of theirs.
NAIVE = ("naive", "naive-compile")
#: What `auto` chooses, and the public call, which is on it.
CHOSEN = (
    "warpline", "warpline-int8", "cpu", "cpu-int8", "persistent", "persistent-int8", "graph", "graph-int8",
)  # fmt: skip
#: Those that are ours to be proud of, or not.
OURS = (*CHOSEN, "torch", "torch-compile", "kernels")
