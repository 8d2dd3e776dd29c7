"""Ours with a KV cache of int8 codes. Not what the others compute, so tokens may differ; the row says how many do."""

from __future__ import annotations

from warpline.bench.methods.ours import OnGraph, OnLLM


class OnLLMInt8Kv(OnLLM):
    """As a user calls it."""

    title = "warpline (LLM.generate), int8 KV cache"
    devices = ("cuda",)
    exact = False
    kv_stored = "int8"


class OnGraphInt8Kv(OnGraph):
    """The executor alone."""

    title = "warpline graph executor, int8 KV cache"
    exact = False
    kv_stored = "int8"
