"""Patch a Hugging Face GPT-2 you already have: python examples/hf_patch.py [model]

Without an argument it makes a small random model, so that it runs anywhere, without a network or a GPU.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import warpline.hf as whf


def load(name: str | None) -> Any:
    """Your model: whatever `transformers` loads."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    ends = {"vocab_size": 1000, "bos_token_id": 999, "eos_token_id": 999}
    return AutoModelForCausalLM.from_config(GPT2Config(n_layer=4, n_head=4, n_embd=128, **ends))


def seconds(model: Any, ids: torch.Tensor, **arguments: Any) -> float:
    """Of one generation, behind one to warm up."""
    for _ in range(2):
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **arguments)
        elapsed = time.perf_counter() - start
    return elapsed


def main() -> None:
    """Time it as it is, patch it, time it again, take the patch back."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(sys.argv[1] if len(sys.argv) > 1 else None).to(device).eval()
    if device == "cuda":
        model = model.half()
    ids = torch.arange(1, 17, device=device)[None]
    greedy = {"max_new_tokens": 50, "do_sample": False}

    before = seconds(model, ids, **greedy)
    report = whf.patch(model)
    after = seconds(model, ids, **greedy)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, num_beams=2, pad_token_id=0)
    print(report)  # what was replaced, what was left and why, and where each call of generate ran
    print(f"50 tokens: {1e3 * before:.1f} ms as it was, {1e3 * after:.1f} ms patched")

    whf.unpatch(model)
    with whf.patched(model, generate=False), torch.no_grad():  # kernels only, for as long as the block lasts
        model(ids)


if __name__ == "__main__":
    main()
