"""Text as it comes, of one prompt and of several at once: python examples/stream.py [model]"""

from __future__ import annotations

import asyncio
import sys

from warpline import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=40, seed=3)


async def follow(llm: LLM, number: int, prompt: str) -> str:
    """A request joins whatever runs; its pieces come while others are written."""
    text = prompt
    async for piece in llm.submit(prompt, PARAMS):
        text += piece
        print(f"{number}: {len(text):4} characters", flush=True)
    return text


async def many(llm: LLM) -> None:
    """Two readers, one batch."""
    found = await asyncio.gather(*(follow(llm, i, p) for i, p in enumerate(("A bear and a bee", "The old whale"), 1)))
    print("\n".join(found))


def main() -> None:
    """One after the other."""
    llm = LLM(*sys.argv[1:2])
    stream = llm.stream("The fox and the owl", PARAMS)
    for piece in stream:
        print(piece, end="", flush=True)
    assert stream.completion is not None
    print(f"\n({stream.completion.finish_reason}, {len(stream.completion.token_ids)} tokens)\n")

    handle = llm.submit("A frog", PARAMS)
    handle.cancel()
    print("cancelled:", handle.result().finish_reason)
    asyncio.run(many(llm))


if __name__ == "__main__":
    main()
