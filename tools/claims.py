"""The sentences in documents that claim speeds, made from results/*/bench.jsonl, and projections marked as such."""

from __future__ import annotations

import json

from tools.benchmarks import DRAWN, ROOT, SHOWN, machines
from warpline.bench import report
from warpline.bench.methods.names import HEADLINE
from warpline.bench.report import Row
from warpline.hardware import known_gpu
from warpline.model import cost
from warpline.model.weights import read_config

#: Tokens per second that others have published for gpt2 on a T4.
PUBLISHED_T4 = {"random:gpt2": "206 (fp16, torch.compile), 426 (a derivative of llm.c with a KV cache)"}
PEERS = {"onnxruntime": "ONNX Runtime", "ctranslate2": "CTranslate2", "hf-sdpa": "`transformers`"}
#: What the README calls the methods of others.
TITLES = {
    **PEERS,
    "static-kv-compile": "PyTorch: static KV cache, `torch.compile`",
    "onnxruntime": "ONNX Runtime, fp32",
}
#: Servers side by side (tools/servers.py), ours first, and how many requests they get at once.
SERVERS = (
    "warpline fp32", "llama-cpp-python f32", "transformers serve fp32", "warpline int8", "llama-cpp-python q8_0",
)  # fmt: skip
STREAMS = 8


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
        whole, moved = (
            cost.total_bytes(cost.decode(read_config(model), dtype, screened=screened)) for screened in (False, True)
        )
        limit, best = (1e9 * card.spec_bandwidth / each for each in (whole, moved))
        projected = f"{share * best:,.0f} to {most * best:,.0f}" if share < most else f"{share * best:,.0f}"
        lines.append(
            f"| {model} {dtype} | {whole / 1e6:,.1f} | {limit:,.0f} | {moved / 1e6:,.1f} | ~{projected} |"
            f" {PUBLISHED_T4.get(model, '')} |"
        )
    here = rows[0]["device"]
    note = "\n".join([
        f"**A projection, not a measurement**: {card.name} by its datasheet ({card.spec_bandwidth:,.0f} GB/s). The",
        "limit is for all weights read once per token; `persistent` reads less (its MB): codes of the LM head.",
        "The lower projection has the share of the bandwidth that `persistent` reaches with the same",
        f"model on the {here}, the higher one that of the largest model there ({100 * most:.0f} %): bytes take a T4",
        f"{slower:.0f} times as long, so that all else counts for less. The path for its generation (sm_75) is",
        "compiled, and runs on newer GPUs; it has not been timed on a T4.",
    ])  # fmt: skip
    head = (
        "| model | MB a token | limit, tok/s | its MB | projected tok/s | published elsewhere |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    return "\n".join([note, "", head, *lines])


def cpu() -> str:
    """What the page on CPUs says first: the newest run with the public call in both dtypes."""
    run = _cpu_run()
    speed = {name: f"{row['tokens_per_second']:.0f}" for name, row in run.items()}
    theirs = [
        f"{title} {speed[name]}" + (f" (in int8 {speed[f'{name}-int8']})" if f"{name}-int8" in speed else "")
        for name, title in PEERS.items()
        if name in speed
    ]
    one = run[HEADLINE]
    return "\n".join([
        f"GPT-2 124M on an {one['device']} with {one['threads']} threads, one run, prompt {one['prompt']},"
        f" {one['new']} new tokens, tokens per second:",
        f"{speed[f'{HEADLINE}-int8']} in int8 and {speed[HEADLINE]} in fp32; of others {', '.join(theirs)}.",
    ])  # fmt: skip


def calls() -> str:
    """The table of the README: what a user calls, and what they would use instead, each pair from one run."""
    one, many, mix = (_gpu_run(*case) for case in ((DRAWN, 1), ("batch", 64), ("throughput", None)))
    cpu = _cpu_run()
    int8 = f"{HEADLINE}-int8"
    lines = [
        _call("`LLM.generate`, one prompt", one[HEADLINE], _peer(one)),
        _call("`LLM.generate`, 64 prompts at once", many[HEADLINE], _peer(many)),
        _call(f"`LLM.generate`, {mix[HEADLINE]['batch']:,} prompts of unequal length", mix[HEADLINE], _peer(mix)),
        _call("`LLM.generate` on a CPU, fp32", cpu[HEADLINE], _peer(cpu)),
        _call("`LLM.generate` on a CPU, int8", cpu[int8], _peer(cpu)),
    ]
    gpu, host = one[HEADLINE], cpu[HEADLINE]
    titles = "| what you call | prompt + new tokens | tokens/s | instead | tokens/s | |"
    return "\n".join([
        titles,
        "| --- | --- | ---: | --- | ---: | ---: |",
        *lines,
        "",
        f"GPT-2 124M with random weights, greedy: three rows on one {gpu['device']} in {gpu['dtype']}, two on an"
        f" {host['device']} with {host['threads']} threads.",
        f"The first row has {gpu['percent_of_limit']:.0f} % of the speed that the GPU's memory allows, the fourth"
        f" {host['percent_of_limit']:.0f} % of the CPU's. CTranslate2 in int8 writes"
        f" {cpu['ctranslate2-int8']['tokens_per_second']:,.0f} tokens/s there.",
    ])  # fmt: skip


def served() -> str:
    """Our HTTP server and others', the newest run of `make bench-servers`, eight streams at once."""
    found = [json.loads(line) for line in (ROOT / "results" / "cpu" / "serve.jsonl").read_text().splitlines()]
    rows = [row for row in found if row["label"] in SERVERS and row["max_concurrency"] == STREAMS]
    newest = max((row for row in rows if row["label"] == SERVERS[0]), key=lambda row: row["time"])
    alike = ("source", "device", "model", "input_len", "output_len")
    run = [row for row in rows if all(row[name] == newest[name] for name in alike)]
    last = {row["label"]: row for row in sorted(run, key=lambda row: row["time"])}
    lines = [
        f"| {label} | {last[label]['output_throughput']:,.1f} | {last[label]['median_ttft_ms']:,.0f} |"
        for label in SERVERS
        if label in last
    ]
    shape = f"{newest['input_len']} + {newest['output_len']} tokens"
    return "\n".join([
        f"{newest['device']}, gpt2's shape, {shape}, {STREAMS} requests at once, {newest['time'][:10]}:",
        "",
        "| server | tokens/s | first token, median ms |",
        "| --- | ---: | ---: |",
        *lines,
    ])  # fmt: skip


def _call(name: str, ours: Row, peer: Row) -> str:
    shape = f"{ours['prompt']} + {ours['new']}"
    factor = ours["tokens_per_second"] / peer["tokens_per_second"]
    other = TITLES.get(peer["method"], f"`{peer['method']}`")
    if "padded_batch" in peer:
        other += f", padded batches of {peer['padded_batch']}"
    return (
        f"| {name} | {shape} | **{ours['tokens_per_second']:,.0f}** | {other} | {peer['tokens_per_second']:,.0f}"
        f" | {factor:.1f}× |"
    )


def _peer(run: dict[str, Row]) -> Row:
    found = report.yardsticks(list(run.values()))[1]
    assert found is not None
    return found


def _gpu_run(workload: str, batch: int | None) -> dict[str, Row]:
    """The methods of one case on the machine of the README; without a batch, the only one there is."""
    machine, model, dtype = SHOWN
    wanted = (workload, model, dtype)
    rows = [row for row in machines()[machine] if (row["workload"], row["model"], row["dtype"]) == wanted]
    cases = [
        {row["method"]: row for row in group if row["status"] == "ok"}
        for group in report.grouped(rows).values()
        if batch in (None, group[0]["batch"])
    ]
    if not cases or HEADLINE not in cases[0]:
        raise SystemExit(f"the newest run of {workload} has no time of {HEADLINE}")
    return cases[0]


def _cpu_run() -> dict[str, Row]:
    wanted = (DRAWN, SHOWN[1], "fp32", 1)
    runs = [
        {row["method"]: row for row in group if row["status"] == "ok"}
        for rows in machines().values()
        if not rows[0]["gpu"]
        for group in report.grouped(rows).values()
        if tuple(group[0][name] for name in ("workload", "model", "dtype", "batch")) == wanted
    ]
    return max(
        (run for run in runs if {HEADLINE, f"{HEADLINE}-int8"} <= run.keys()), key=lambda run: run[HEADLINE]["time"]
    )
