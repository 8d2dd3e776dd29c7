"""Our methods with a KV cache of int8 codes. Tokens may differ from the others'; the row says how many agree."""

from __future__ import annotations

from warpline.bench.methods.ours import OnGraph, OnLLM


class OnLLMInt8Kv(OnLLM):
    """`LLM.generate` with an int8 KV cache."""

    title = "warpline (LLM.generate), int8 KV cache"
    devices = ("cuda",)
    exact = False
    kv_stored = "int8"


class OnGraphInt8Kv(OnGraph):
    """The graph executor with an int8 KV cache."""

    title = "warpline graph executor, int8 KV cache"
    exact = False
    kv_stored = "int8"
