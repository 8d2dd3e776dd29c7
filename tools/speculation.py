"""Measures what drafts bring on a CPU, on real text: `LLM.generate` without and with them, and transformers' prompt
lookup.

    python -m tools.speculation --dtype fp32,int8 --rounds 5

All are run in turn, greedy and sampled, with the `stories` model, which continues these texts: random weights repeat
themselves, which would favour drafts. The text must be the same with and without drafts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Threads of torch must not spin on the cores of the team.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from warpline import LLM, SamplingParams
from warpline.bench.methods.hf import as_transformers
from warpline.model.weights import load

#: Prompts by the kind of text that follows them.
TEXTS = {
    "repeated": (
        "Tom likes red. Tom likes blue. Tom likes green. Tom likes",
        'One day, Tom said: "Hello, hello, hello, hello, hello,',
        "The cat is big. The dog is big. The cow is big. The pig is big. The",
    ),
    "list": (
        "1. A red ball.\n2. A blue ball.\n3. A green ball.\n4. A",
        "Mom has one egg. Dad has two eggs. Sue has three",
    ),
    "code": ("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef",),
    "open": ("Once upon a time there was a cat", "One day, Tom", "The sun was", "Lily and Ben went to"),
}
TOKENS = 120


def main() -> None:
    """Print a line for each kind of text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="fp32,int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3, help="speculative_tokens")
    asked = parser.parse_args()
    (peer,) = as_transformers(load("stories"), torch.device("cpu"))
    print("| dtype, text | plain tok/s | with drafts | ratio (least to most) | tokens a pass | transformers' lookup |")
    print("|---|---|---|---|---|---|")
    for dtype in asked.dtype.split(","):
        plain = LLM("stories", device="cpu", dtype=dtype, max_batch=1)
        drafting = LLM(
            "stories", device="cpu", dtype=dtype, max_batch=1, speculate="ngram", speculative_tokens=asked.tokens
        )
        for kind, texts in TEXTS.items():
            print(f"| {dtype}, {kind} | {measured(plain, drafting, peer, texts, 0, asked)} |", flush=True)
        for kind, temperature in (("open, sampled", 0.8), ("worst", 1.5)):
            found = measured(plain, drafting, None, TEXTS["open"], temperature, asked)
            print(f"| {dtype}, {kind} | {found} |", flush=True)


def measured(
    plain: LLM, drafting: LLM, peer: Any, texts: tuple[str, ...], temperature: float, asked: argparse.Namespace
) -> str:
    """Time all of them in turn; the first round does not count."""
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, top_p=1.0, seed=1, ignore_eos=True)
    rounds = []
    for _ in range(asked.rounds + 1):
        spent = [0.0, 0.0, 0.0]
        lane_steps = accepted = 0
        for text in texts:
            seconds, expected = timed(partial(plain.generate, text, params))
            spent[0] += seconds
            seconds, found = timed(partial(drafting.generate, text, params))
            spent[1] += seconds
            if found[0].token_ids != expected[0].token_ids:
                raise RuntimeError(f"drafts have changed what follows {text!r}")
            lane_steps += found[0].timings.lane_steps
            accepted += found[0].timings.accepted
            if peer is not None:
                ids = torch.tensor([plain.tokenizer.encode(text)])
                spent[2] += timed(partial(looked_up, peer, ids, asked.tokens))[0]
        rounds.append(spent)
    speeds = [[TOKENS * len(texts) / s if s else 0.0 for s in spent] for spent in rounds[1:]]
    without, drafted, peers = (statistics.median(column) for column in zip(*speeds, strict=True))
    ratios = [spent[0] / spent[1] for spent in rounds[1:]]
    return (
        f"{without:,.0f} | {drafted:,.0f} | **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to "
        f"{max(ratios):.2f})"
        f" | {1 + accepted / lane_steps:.2f} | {f'{peers:,.0f}' if peers else '-'}"
    )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    begun = time.perf_counter()
    found = call()
    return time.perf_counter() - begun, found


@torch.no_grad()
def looked_up(model: Any, ids: torch.Tensor, count: int) -> None:
    """Generate greedy text with transformers' prompt lookup in fp32."""
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
        prompt_lookup_num_tokens=count,
    )  # fmt: skip


if __name__ == "__main__":
    main()
