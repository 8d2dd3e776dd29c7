"""Runs `LLM` in this process on the requests that a server got, as the reference for the server."""

from __future__ import annotations

import time

from warpline.bench.serving.figures import Row, percentile
from warpline.bench.serving.load import Load
from warpline.config import SamplingParams
from warpline.engine.llm import LLM
from warpline.engine.prompts import Prompt

#: How many requests have their first token timed.
FIRST_TOKENS = 200


def measured(load: Load, model: str, *, device: str, dtype: str) -> Row:
    """Return the library's figures for a row: tokens per second of one call with all requests, at the server's
    concurrency, and with a concurrency of 1 the time to the first piece of a stream."""
    llm = LLM(model, device=device, dtype=dtype, max_batch=load.concurrency)
    try:
        llm.warm_up()
        asked = [(prompt.ids if load.ids else prompt.text, _params(prompt.new)) for prompt in load.prompts()]
        prompts: list[Prompt] = [prompt for prompt, _ in asked]
        params = [its for _, its in asked]
        llm.generate(prompts[: load.concurrency], params[: load.concurrency])
        began = time.perf_counter()
        tokens = sum(len(completion.token_ids) for completion in llm.generate(prompts, params))
        row: Row = {"library_output_throughput": round(tokens / (time.perf_counter() - began), 2)}
        if load.concurrency == 1:
            firsts = sorted(_first(llm, *one) for one in asked[:FIRST_TOKENS])
            row |= {f"library_p{share}_ttft_ms": round(1e3 * percentile(firsts, share), 4) for share in (50, 99)}
        return row
    finally:
        llm.close()


def compared(row: Row, library: Row) -> Row:
    """Return the row with the library's figures and the server's share of them."""
    row = row | library
    row["share_of_library"] = round(row["output_throughput"] / row["library_output_throughput"], 4)
    for share in (50, 99):
        if (alone := row.get(f"library_p{share}_ttft_ms")) is not None:
            row[f"added_p{share}_ttft_ms"] = round(row[f"p{share}_ttft_ms"] - alone, 4)
    return row


def _params(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)


def _first(llm: LLM, prompt: Prompt, params: SamplingParams) -> float:
    began = time.perf_counter()
    stream = llm.stream(prompt, params)
    next(stream, None)
    took = time.perf_counter() - began
    for _ in stream:
        pass
    return took
