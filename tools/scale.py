"""Measures what replicas give and what Ray costs, on this machine, one part at a time:

    python -m tools.scale ttft|replicas|load|batch|many|offline --save results

`load` is what docs/scale.md compares: the simulator, and the server under the same requests.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tools.simulated import MODEL, load
from warpline import LLM, SamplingParams, hardware
from warpline.bench.rows import append, provenance
from warpline.bench.serving.client import Target
from warpline.bench.serving.figures import percentile
from warpline.bench.serving.load import Load
from warpline.bench.serving.process import Server, resident_mb
from warpline.bench.serving.run import Asking, measured
from warpline.scale.batch import generate
from warpline.scale.files import Done, Output
from warpline.serve.address import address_of

Row = dict[str, Any]
ONE_THREAD = ("-m", "warpline", "serve", "--model", MODEL, "--device", "cpu", "--dtype", "fp32", "--threads", "1")


def served(arguments: tuple[str, ...], loads: list[Load], label: str, warmups: int | None = None) -> list[Row]:
    with Server((*ONE_THREAD, *arguments), sys.executable, patience=60) as server:
        wait_until_healthy(server)
        asking = Asking(label=label, warmups=warmups)
        return measured(Target(address_of(server.url)), loads, asking, {}, server=server)


def wait_until_healthy(server: Server, seconds: float = 120.0) -> None:
    """Wait for /health: Ray's proxy answers before there is an app behind it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        server.require_alive()
        with contextlib.suppress(OSError), urlopen(f"{server.url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"{server.url} is not healthy after {seconds:g} s")


def ttft(rounds: int) -> list[Row]:
    """Time a request for one token, directly and through Ray, with both servers running and asked in turn. The engine's
    time, which the server reports, differs between two processes by more than Ray's, so it is subtracted: the rest is
    the way there and back."""
    found: dict[str, list[tuple[float, float]]] = {"straight": [], "Ray, HAProxy": []}
    with Server(ONE_THREAD, patience=60) as straight, Server((*ONE_THREAD, "--replicas", "1"), patience=60) as through:
        for server in (straight, through):
            wait_until_healthy(server)
        for turn in range(24 * rounds + 2):
            for server, label in zip((straight, through), found, strict=True):
                times = single(server.port, 20)
                found[label] += times if turn > 1 else []
    made = provenance() | {"device": hardware.describe("cpu").name, "model": MODEL}
    rows = []
    for label, times in found.items():
        whole, way = sorted(1e3 * all_of for all_of, _ in times), sorted(1e3 * (all_of - own) for all_of, own in times)
        rows.append(made | {
            "kind": "ttft", "label": label, "num_prompts": len(times), "input_len": 16, "output_len": 1,
            "median_ttft_ms": round(percentile(whole, 50), 4), "p99_ttft_ms": round(percentile(whole, 99), 4),
            "median_way_ms": round(percentile(way, 50), 4), "p99_way_ms": round(percentile(way, 99), 4),
        })  # fmt: skip
    return rows


def single(port: int, count: int) -> list[tuple[float, float]]:
    """Return the whole time and the engine's part of some requests, sent one after the other on one connection."""
    body = json.dumps({"prompt": list(range(1000, 1016)), "max_tokens": 1, "temperature": 0, "return_timings": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    found = []
    for _ in range(count):
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse().read()
        found.append((time.perf_counter() - began, json.loads(answer)["timings"]["first_token_seconds"]))
    connection.close()
    return found


def replicas(rounds: int) -> list[Row]:
    """Measure servers of one and two replicas with as many concurrent requests per replica as it has slots."""
    rows = []
    for _ in range(rounds):
        for count in (1, 2):
            load = Load(prompt=16, new=64, concurrency=32 * count, requests=320 * count)
            rows += [
                {"kind": "replicas", "replicas": count, **row}
                for row in served(("--replicas", str(count)), [load], f"{count} × 1 thread")
            ]
    return rows


def offline(rounds: int) -> list[Row]:
    """Run a file on one and on two replicas of one thread; count the time between the first chunks and the last."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prompts = written(Path(folder) / "prompts.jsonl", 4096)
        for turn in range(rounds):
            for count in (1, 2):
                out = Path(folder) / f"{turn}-{count}.jsonl"
                with followed() as stamps:
                    done = generate(
                        prompts, out, model=MODEL, dtype="fp32", device="cpu", threads=1, replicas=count,
                        params=SamplingParams(max_tokens=16, ignore_eos=True),
                    )  # fmt: skip
                (first, before, _), (last, lines, _) = stamps[count * 4], stamps[-1 - count * 4]
                steady = (lines - before) / (last - first)
                rows.append({"kind": "offline", "replicas": count, "model": MODEL, "prompts": done.good,
                             "new": 16, "seconds": round(done.seconds, 3), "prompts_per_second": round(steady, 2),
                             "output_throughput": round(16 * steady, 2)})  # fmt: skip
    made = provenance() | {"device": hardware.describe("cpu").name}
    return [made | row for row in rows]


@contextlib.contextmanager
def followed() -> Iterator[list[tuple[float, int, float]]]:
    """Yield (time, lines done, CPU time of this process) per commit, so that the start of Ray can be left out."""
    stamps: list[tuple[float, int, float]] = []
    commit = Output.commit

    def noted(self: Output, done: Done) -> None:
        commit(self, done)
        stamps.append((time.perf_counter(), self.lines, time.process_time()))

    Output.commit = noted  # type: ignore[method-assign]
    try:
        yield stamps
    finally:
        Output.commit = commit  # type: ignore[method-assign]


def written(path: Path, count: int) -> Path:
    """Write short prompts, all different."""
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"id": i, "prompt": prompt_of(i)}) + "\n")
    return path


def prompt_of(number: int) -> str:
    return f"Once upon a time, friend number {number} found a key and"


#: Number of short prompts, and the parameters for a few tokens of each.
SHORT = 2048
FEW = SamplingParams(max_tokens=8, ignore_eos=True, seed=0)


def batch(rounds: int) -> list[Row]:
    """Time `warpline.scale.generate` from file to file and `LLM.generate` over the same prompts in turn, each in its
    own process: OpenMP threads that one leaves behind would slow down the other."""
    rows: list[Row] = []
    made = provenance() | {"device": hardware.describe("cpu").name, "threads": hardware.threads()}
    for _ in range(4 * rounds):
        found = {}
        for way in ("direct", "through"):
            found[way] = in_process(way)
        ratio = found["through"]["prompts_per_second"] / found["direct"]["prompts_per_second"]
        shape = {"kind": "batch", "model": MODEL, "prompts": SHORT, "new": FEW.max_tokens, "ratio": round(ratio, 4)}
        rows.append(made | shape | {f"{way}_{name}": value for way in found for name, value in found[way].items()})
    print("ratio", statistics.median(row["ratio"] for row in rows))
    return rows


#: Number of prompts of `many`.
MANY = 100_000


def many(rounds: int) -> list[Row]:
    """Time `warpline batch` over a hundred thousand prompts, and `LLM.generate` over half of them before it and half
    after it, so that a drift of the machine's speed affects both. Read the memory of the batch every second."""
    made = provenance() | {"device": hardware.describe("cpu").name, "threads": hardware.threads()}
    before = in_process("direct", 0, MANY // 2)
    with tempfile.TemporaryDirectory() as folder:
        path, out = written(Path(folder) / "prompts.jsonl", MANY), Path(folder) / "out.jsonl"
        command = [
            sys.executable, "-m", "warpline", "batch", str(path), str(out), "--model", MODEL, "--device", "cpu",
            "--dtype", "fp32", "--max-tokens", str(FEW.max_tokens), "--seed", "0", "--ignore-eos",
        ]  # fmt: skip
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            memory = list(resident(process))
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    if process.returncode or [line["id"] for line in lines] != list(range(MANY)):
        raise SystemExit(f"warpline batch ended with {process.returncode} and {len(lines):,} lines, or out of order")
    behind = in_process("direct", MANY // 2, MANY)
    alone = 2 / (1 / before["prompts_per_second"] + 1 / behind["prompts_per_second"])
    tenth = len(memory) // 10
    return [made | {
        "kind": "many", "model": MODEL, "prompts": MANY, "new": FEW.max_tokens, "seconds": round(seconds, 2),
        "through_prompts_per_second": round(MANY / seconds, 2), "direct_prompts_per_second": round(alone, 2),
        "direct_before": before["prompts_per_second"], "direct_behind": behind["prompts_per_second"],
        "ratio": round(MANY / seconds / alone, 4),
        "resident_mb": [round(max(memory[at * tenth : (at + 1) * tenth]), 1) for at in range(10)],
    }]  # fmt: skip


def resident(process: subprocess.Popen[bytes]) -> Iterator[float]:
    """Yield the resident megabytes of a process, every second until it ends."""
    while process.poll() is None:
        yield resident_mb(process.pid)
        time.sleep(1)


def in_process(way: str, *numbers: int) -> Row:
    """Run a part of this program in a process of its own; return its row."""
    command = [sys.executable, "-m", "tools.scale", way, *(f"--prompts={number}" for number in numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def direct(rounds: int, prompts: Sequence[int] = (0, SHORT)) -> list[Row]:
    """Time `LLM.generate`, warm, over some of the prompts."""
    first, last = prompts
    chosen = [prompt_of(i) for i in range(first, last)]
    llm = LLM(MODEL, device="cpu", dtype="fp32")
    llm.generate(chosen[:64], FEW)
    began, cpu = time.perf_counter(), time.process_time()
    llm.generate(chosen, FEW)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return [{"prompts_per_second": round(len(chosen) / seconds, 2), "cores": round(cpu / seconds, 3)}]


def through(rounds: int) -> list[Row]:
    """Time a run from file to file, without the first and last chunks, which load the model or leave slots empty."""
    with tempfile.TemporaryDirectory() as folder, followed() as stamps:
        path = written(Path(folder) / "prompts.jsonl", SHORT)
        generate(path, Path(folder) / "out.jsonl", model=MODEL, device="cpu", dtype="fp32", params=FEW)
    (began, before, cpu), (ended, lines, spent) = stamps[3], stamps[-4]
    rate, cores = (lines - before) / (ended - began), (spent - cpu) / (ended - began)
    return [{"prompts_per_second": round(rate, 2), "cores": round(cores, 3)}]


def main() -> None:
    parts: dict[str, Callable[..., list[Row]]] = {
        "ttft": ttft, "replicas": replicas, "offline": offline, "load": load, "batch": batch, "many": many,
        "direct": direct, "through": through,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, action="append", help="of `direct`: the first, and behind the last")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    rows = parts[given.part](given.rounds, **({"prompts": given.prompts} if given.prompts else {}))
    if given.save is not None:
        append(given.save, "scale", rows)
    shown = (
        "kind", "label", "replicas", "share", "request_throughput", "output_throughput", "median_ttft_ms",
        "p99_ttft_ms", "median_way_ms", "p99_way_ms", "simulated_output_throughput", "simulated_p50_ttft_ms",
        "simulated_p99_ttft_ms", "ratio", "direct_prompts_per_second", "through_prompts_per_second", "cores",
        "prompts_per_second", "steps", "prompts", "turn", "request", "resident_mb", "direct_before", "direct_behind",
    )  # fmt: skip
    for row in rows:
        print(json.dumps({name: row[name] for name in shown if name in row}))


if __name__ == "__main__":
    main()
