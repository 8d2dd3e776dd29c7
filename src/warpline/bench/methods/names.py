"""The names of the methods, for code that must not import torch."""

from __future__ import annotations

#: Every method and its module and class, imported when chosen. Rows come in this order, `LLM` before all others.
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

#: The public call, and the method that all others are compared with where it was measured.
HEADLINE, BASELINE = "warpline", "naive"
#: The public call with either kind of weights.
CALLED = (HEADLINE, "warpline-int8")
#: The methods with int8 weights; `--dtype int8` selects them.
INT8 = (
    "warpline-int8", "cpu-int8", "graph-int8", "persistent-int8", "static-kv-compile-int8", "ctranslate2-int8",
)  # fmt: skip
#: The methods with an int8 KV cache: they are listed with the others and compared with none of them.
INT8_KV = ("warpline-int8-kv", "graph-int8-kv")
#: The model as one writes it first: others are compared with it, and it does not count as a peer.
NAIVE = ("naive", "naive-compile")
#: What `auto` chooses, and the public call, which uses `auto`.
CHOSEN = (
    "warpline", "warpline-int8", "cpu", "cpu-int8", "persistent", "persistent-int8", "graph", "graph-int8",
)  # fmt: skip
#: All methods that are ours.
OURS = (*CHOSEN, "torch", "torch-compile", "kernels")
