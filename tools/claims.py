"""The sentences in documents that claim speeds, made from results/*/bench.jsonl, and projections marked as such."""

from __future__ import annotations

from tools.benchmarks import DRAWN, SHOWN, machines
from warpline.bench import report
from warpline.bench.methods.names import HEADLINE
from warpline.hardware import known_gpu
from warpline.model import cost
from warpline.model.weights import read_config

#: Tokens per second that others have published for gpt2 on a T4.
PUBLISHED_T4 = {"random:gpt2": "206 (fp16, torch.compile), 426 (a derivative of llm.c with a KV cache)"}
PEERS = {"onnxruntime": "ONNX Runtime", "ctranslate2": "CTranslate2", "hf-sdpa": "`transformers`"}


def t4() -> str:
    """Return a projected row for each model measured on the README's machine, because no T4 was available."""
    machine, _, dtype = SHOWN
    card = known_gpu("t4")
    assert card is not None
    assert card.spec_bandwidth is not None
    rows = machines()[machine]
    shares = {
        row["model"]: row["percent_of_limit"] / 100
        for row in rows
        if (row["workload"], row["dtype"], row["method"], row["status"]) == (DRAWN, dtype, "persistent", "ok")
    }
    most, slower = max(shares.values()), max(row["read_gb_s"] for row in rows) / card.spec_bandwidth
    lines = []
    for model, share in sorted(shares.items(), key=lambda item: -item[1]):
        moved = cost.total_bytes(cost.decode(read_config(model), dtype))
        limit = 1e9 * card.spec_bandwidth / moved
        projected = f"{share * limit:,.0f} to {most * limit:,.0f}" if share < most else f"{share * limit:,.0f}"
        published = PUBLISHED_T4.get(model, "")
        lines.append(f"| {model} {dtype} | {moved / 1e6:,.1f} | {limit:,.0f} | ~{projected} | {published} |")
    here = rows[0]["device"]
    note = "\n".join([
        f"**A projection, not a measurement**: {card.name} by its datasheet ({card.spec_bandwidth:,.0f} GB/s), all",
        "weights of a token read once. The lower figure has the share of the limit that `persistent` reaches with the",
        f"same model on the {here}, the higher one that of the largest model there ({100 * most:.0f} %): bytes take a",
        f"T4 {slower:.0f} times as long, so that all else counts for less. The path for its generation (sm_75) is",
        "compiled, and runs on newer GPUs; nobody has timed it on a T4.",
    ])  # fmt: skip
    head = (
        "| model | MB a token | limit, tok/s | projected tok/s | published elsewhere |\n| --- | --- | --- | --- | --- |"
    )
    return "\n".join([note, "", head, *lines])


def cpu() -> str:
    """Return the README's text on machines without a GPU: the newest run with the public call in both dtypes."""
    wanted = (DRAWN, SHOWN[1], "fp32", 1)
    runs = [
        {row["method"]: row for row in group if row["status"] == "ok"}
        for rows in machines().values()
        if not rows[0]["gpu"]
        for group in report.grouped(rows).values()
        if tuple(group[0][name] for name in ("workload", "model", "dtype", "batch")) == wanted
    ]
    run = max(
        (run for run in runs if {HEADLINE, f"{HEADLINE}-int8"} <= run.keys()), key=lambda run: run[HEADLINE]["time"]
    )
    speed = {name: f"{row['tokens_per_second']:.0f}" for name, row in run.items()}
    theirs = [
        f"{title} {speed[name]}" + (f" (in int8 {speed[f'{name}-int8']})" if f"{name}-int8" in speed else "")
        for name, title in PEERS.items()
        if name in speed
    ]
    one = run[HEADLINE]
    shape = f"{one['threads']} threads, one run, prompt {one['prompt']}, {one['new']} new tokens, tokens per second"
    return "\n".join([
        "- **No GPU?** Then a team of threads decodes, compiled for your CPU on first use, from fp32, half precision",
        f"  or int8 weights. GPT-2 124M on {shape}:",
        f"  {speed[f'{HEADLINE}-int8']} in int8 and {speed[HEADLINE]} in fp32; of others {', '.join(theirs)}.",
        "  [How, and what int8 costs](docs/cpu.md).",
    ])  # fmt: skip


def lead() -> str:
    """Return the README's first sentences on speed."""
    machine, model, dtype = SHOWN
    rows = [
        row
        for row in machines()[machine]
        if (row["workload"], row["model"], row["dtype"], row["batch"]) == (DRAWN, model, dtype, 1)
        and row["status"] == "ok"
    ]
    ours, peer = next(row for row in rows if row["method"] == HEADLINE), report.yardsticks(rows)[1]
    assert peer is not None
    return "\n".join([
        f"GPT-2 124M, random weights, prompt {ours['prompt']}, {ours['new']} new tokens, batch 1, one",
        f"{ours['device']}, one run: `LLM.generate`, from ids to text, writes",
        f"**{ours['tokens_per_second']:,.0f} tokens/s**, {ours['percent_of_limit']:.0f} % of what memory allows, and",
        f"`{peer['method']}`, the fastest PyTorch we know how to write, {peer['tokens_per_second']:,.0f}.",
        "`persistent` and `graph` are executors, on which it runs.",
    ])  # fmt: skip
