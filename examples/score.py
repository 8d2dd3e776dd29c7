"""How likely a text is, and what else would have been: python examples/score.py [model]"""

from __future__ import annotations

import math
import sys

from warpline import LLM, SamplingParams

TEXTS = ("Once upon a time, there was a little girl.", "Once upon a time, there was a little tax form.")


def main() -> None:
    """The likelihood of given texts, then the alternatives to each token that is written."""
    llm = LLM(*sys.argv[1:2])
    for text in TEXTS:
        score = llm.score([text])
        print(f"{score.perplexity:8.1f} perplexity  {text}")

    (completion,) = llm.generate("The dragon was", SamplingParams(max_tokens=5, temperature=0, logprobs=3))
    assert completion.logprobs is not None
    for one in completion.logprobs:
        others = ", ".join(f"{llm.tokenizer.decode([token])!r} {math.exp(p):.2f}" for token, p in one.top)
        print(f"{llm.tokenizer.decode([one.token_id])!r:12} {math.exp(one.logprob):.2f}  of  {others}")


if __name__ == "__main__":
    main()
