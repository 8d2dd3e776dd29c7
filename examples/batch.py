"""Many prompts in one call: python examples/batch.py [model]

They run together, each leaves when it is done, and in fp32 each has the text that it has alone.
"""

from __future__ import annotations

import sys

from warpline import LLM, SamplingParams

OPENINGS = ("The dragon was hungry.", "A frog and a bee", "One rainy morning", "Zoe wanted to paint.")


def main() -> None:
    """Complete all, with settings of their own where they have some, and say how fast."""
    llm = LLM(*sys.argv[1:2], dtype="fp32")
    params = [SamplingParams(max_tokens=32, seed=i, temperature=0.8) for i in range(len(OPENINGS))]
    found = llm.generate(list(OPENINGS), params)
    for completion in found:
        print(f"{completion.prompt}{completion.text}\n  ({completion.finish_reason})")

    (alone,) = llm.generate(OPENINGS[1], params[1])
    print("the same alone:", alone.text == found[1].text)

    tokens, timings = sum(len(completion.token_ids) for completion in found), found[0].timings  # of the whole call
    print(f"{tokens} tokens in {timings.seconds:.2f} s: {tokens / timings.seconds:,.0f} tok/s")


if __name__ == "__main__":
    main()
