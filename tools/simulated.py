"""Runs the simulator and the server with the same requests, for docs/scale.md. Part of tools/scale.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from warpline import LLM, SamplingParams
from warpline.bench.rows import provenance
from warpline.bench.serving.load import Load
from warpline.config import SWITCH_SECONDS
from warpline.scale.simulate import Asked, simulate
from warpline.scale.times import Times
from warpline.scale.times import measured as times_of
from warpline.serve.app import create_app
from warpline.serve.run import Server as UvicornServer
from warpline.serve.run import bound, url_of

Row = dict[str, Any]
MODEL = "stories"
#: Lengths as `warpline bench serve --spread` draws them.
USUAL = Load(prompt=32, new=32, spread=0.5, context=256)
#: Shares of one replica's maximum: of the trial that the times are fitted to, and of the compared loads; seconds of
#: each.
TRIAL, SHARES, SECONDS = 0.88, (0.5, 0.8, 0.95), 40.0


def asked(load: Load) -> list[Asked]:
    lengths, moments = load.lengths(), load.arrivals()
    return [Asked(at, prompt, new) for at, (prompt, new) in zip(moments, lengths, strict=True)]


def load(rounds: int) -> list[Row]:
    """Measure the server at shares of its maximum, and simulate the same requests. The times are measured in the
    process that serves: a step of one sequence takes 4 ms in one process and 6 in the next. The client is a
    process of its own."""
    llm = LLM(MODEL, device="cpu", dtype="fp32", threads=1)
    llm.generate([0], SamplingParams(max_tokens=2))
    found = times_of(llm)
    with here(llm) as url:
        alone = replace(USUAL, concurrency=1, requests=60)
        row = client(url, alone)
        made = {name: row[name] for name in (*provenance(), "device", "model")}
        most = replace(USUAL, requests=320, concurrency=64)
        full = [client(url, most)]
        # The cost of a turn beyond its steps shows where new requests end launches; that of a request, where it is
        # alone.
        some = at_rate(TRIAL * full[0]["request_throughput"])
        trial = client(url, some)
        full.append(client(url, most))
        full_rate = statistics.fmean(row["output_throughput"] for row in full)
        found = with_turn(found, some, trial["mean_tpot_ms"] / 1e3, most, full_rate)
        first = row["median_ttft_ms"] / 1e3 - simulate(found, asked(alone), concurrency=1).percentile("ttft", 50)
        found = replace(found, request=max(0.0, first))
        per_second = statistics.fmean(row["request_throughput"] for row in full)
        served: dict[float, list[tuple[Load, Row]]] = {share: [] for share in SHARES}
        for _ in range(rounds):
            for share, there in served.items():
                one = at_rate(share * per_second)
                there.append((one, client(url, one)))
                full.append(client(url, most))
    rates = [row["output_throughput"] for row in full]
    usual = fitted(found, most, statistics.fmean(rates))
    rows = [made | {"kind": "times", "threads": 1, **usual.row()}]
    rows.append({"kind": "load", "share": None, **full[0], "most": rates, **predicted(usual, most)})
    around = [fitted(found, most, statistics.fmean(pair)) for pair in itertools.pairwise(rates[1:])]
    for i, (share, there) in enumerate(served.items()):
        each = [row | predicted(around[len(SHARES) * turn + i], one) for turn, (one, row) in enumerate(there)]
        rows.append({"kind": "load", "share": share, "rounds": rounds, **medians(each)})
    return rows


def medians(rows: list[Row]) -> Row:
    """Return the medians of every figure of equal runs: at 95 % load one run waits ten times as long as another."""
    found = dict(rows[0])
    for name, value in found.items():
        if isinstance(value, float):
            found[name] = statistics.median(row[name] for row in rows)
    return found


def at_rate(rate: float) -> Load:
    rate = round(rate, 3)
    return replace(USUAL, rate=rate, requests=round(rate * SECONDS))


def with_turn(times: Times, load: Load, tpot: float, most: Load, throughput: float) -> Times:
    """Return times with a cost per turn that gives this mean time per token under `load`, and this throughput."""
    low, high = 0.0, 0.05
    for _ in range(12):
        middle = (low + high) / 2
        tried = fitted(replace(times, turn=middle), most, throughput)
        answers = simulate(tried, asked(load), concurrency=load.concurrency).answers
        if statistics.fmean(one.tpot for one in answers if one.tpot is not None) < tpot:
            low = middle
        else:
            high = middle
    return replace(times, turn=low)


def fitted(times: Times, most: Load, throughput: float) -> Times:
    """Scale the times to the server's maximum throughput right before and after a load. At 95 % of it a change of two
    percent makes a wait six times as long, and the speed of a machine changes by as much."""
    for _ in range(6):
        by = predicted(times, most)["simulated_output_throughput"] / throughput
        times = replace(
            times,
            steps=tuple((lanes, by * seconds) for lanes, seconds in times.steps),
            prompts=tuple((tokens, by * seconds) for tokens, seconds in times.prompts),
            position=by * times.position,
            turn=by * times.turn,
        )
    return times


@contextlib.contextmanager
def here(llm: LLM) -> Iterator[str]:
    """Run a server in a thread of this process."""
    server = UvicornServer(create_app(llm))
    listening = bound("127.0.0.1", 0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    thread = threading.Thread(target=server.run_on, args=(listening,))
    thread.start()
    try:
        yield url_of(listening)
    finally:
        server.should_exit = True
        thread.join()
        sys.setswitchinterval(before)


def client(url: str, load: Load) -> Row:
    """Send the load with `warpline bench serve`; return its row."""
    options = {
        "url": url, "label": "straight", "requests": load.requests, "prompt": load.prompt, "new": load.new,
        "spread": load.spread, "context": load.context, "concurrency": load.concurrency, "rate": load.rate,
    }  # fmt: skip
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "warpline", "bench", "serve", "--json", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    return dict(row)


def predicted(times: Times, load: Load) -> Row:
    outcome = simulate(times, asked(load), concurrency=load.concurrency)
    figures: Row = {"simulated_output_throughput": round(outcome.throughput, 2)}
    for name in ("ttft", "tpot"):
        for share in (50, 99):
            figures[f"simulated_p{share}_{name}_ms"] = round(1e3 * outcome.percentile(name, share), 3)
    return figures
