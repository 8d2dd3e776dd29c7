"""The names of the methods, for whoever must not wait for torch."""

from __future__ import annotations

#: Every method and its home; loaded when chosen. The first is what the others are compared with.
METHODS = {
    "naive": "ours:Naive",
    "naive-compile": "ours:NaiveCompiled",
    "torch": "ours:OnTorch",
    "torch-compile": "ours:OnTorchCompiled",
    "cpu": "ours:OnCpu",
    "cpu-int8": "ours:OnCpuInt8",
    "kernels": "ours:OnKernels",
    "graph": "ours:OnGraph",
    "persistent": "ours:OnPersistent",
    "hf-eager": "hf:Eager",
    "hf-sdpa": "hf:Sdpa",
    "hf-static-compile": "hf:StaticCompiled",
    "static-kv": "static_kv:StaticKV",
    "static-kv-graph": "static_kv:StaticKVGraph",
    "static-kv-compile": "static_kv:StaticKVCompiled",
    "ctranslate2": "ct2:CTranslate2",
    "ctranslate2-int8": "ct2:CTranslate2Int8",
    "onnxruntime": "ort:OnnxRuntime",
}

#: Those with int8 weights; `--dtype int8` means them.
INT8 = ("cpu-int8", "ctranslate2-int8")
#: Those that are ours to be proud of, or not.
OURS = ("torch", "torch-compile", "cpu", "cpu-int8", "kernels", "graph", "persistent")
