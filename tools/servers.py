"""Measures our server and others with OpenAI's API: the same weights (gpt2's shape, random), the same client, in turn.

`make bench-servers` sets up what this needs in a folder: a Python with the other servers, the weights, llama.cpp's
source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from warpline.bench.rows import append
from warpline.bench.serving.client import Target
from warpline.bench.serving.load import Load
from warpline.bench.serving.process import Server
from warpline.bench.serving.run import Asking, measured
from warpline.serve.address import address_of

#: Concurrent requests, and the number of requests.
LOADS = ((1, 4), (8, 16))
USUAL = Load(prompt=64, new=64)


@dataclass(frozen=True)
class Peer:
    """How a server is started, and which fields it refuses. It runs in the folder of the weights."""

    label: str
    arguments: tuple[str, ...]
    ours: bool = False
    omit: tuple[str, ...] = ()


def peers(threads: int) -> list[Peer]:
    cores = ("--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_ctx", "1024")
    llama = ("-m", "llama_cpp.server", "--model_alias", "gpt2", "--interrupt_requests", "False", *cores)
    transformers = ("-m", "transformers.cli.transformers", "serve", "gpt2", "--device", "cpu", "--dtype", "float32")
    warpline = ("-m", "warpline", "serve", "--model", "gpt2", "--device", "cpu")
    return [
        Peer("warpline fp32", (*warpline, "--dtype", "fp32"), ours=True),
        Peer("llama-cpp-python f32", (*llama, "--model", "gpt2-f32.gguf")),
        Peer("transformers serve fp32", transformers, omit=("ignore_eos",)),
        Peer("warpline int8", (*warpline, "--dtype", "int8"), ours=True),
        Peer("llama-cpp-python q8_0", (*llama, "--model", "gpt2-q8_0.gguf")),
    ]


def convert(folder: Path, python: Path) -> None:
    """Convert the weights for llama.cpp."""
    config = folder / "gpt2" / "config.json"
    known = json.loads(config.read_text())
    if "n_ctx" not in known:  # an old name that the script needs
        config.write_text(json.dumps(known | {"n_ctx": known["n_positions"]}))
    script = folder / "llama" / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"
    for kind in ("f32", "q8_0"):
        made = folder / f"gpt2-{kind}.gguf"
        if not made.exists():
            subprocess.run([python, script, folder / "gpt2", "--outtype", kind, "--outfile", made], check=True)


def measure(peer: Peer, python: Path, save: Path | None) -> None:
    with Server(peer.arguments, sys.executable if peer.ours else str(python)) as server:
        loads = [replace(USUAL, concurrency=at_once, requests=count, omit=peer.omit) for at_once, count in LOADS]
        asking = Asking(model="gpt2", label=peer.label, warmups=1, patience=120)
        rows = measured(Target(address_of(server.url)), loads, asking, {}, server=server)
    if save is not None:
        append(save, "serve", rows)
    for row in rows:
        figures = f"{row['output_throughput']:.1f} tok/s, TTFT {row['median_ttft_ms']:.0f} ms"
        print(f"{peer.label:<24} ×{row['max_concurrency']}: {figures}, TPOT {row['median_tpot_ms']:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    folder, save = asked.folder.resolve(), asked.save.resolve() if asked.save else None
    python = folder / "bin" / "python"
    convert(folder, python)
    os.environ["HF_HUB_OFFLINE"] = "1"
    source = str(Path(__file__).parents[1] / "src")
    os.environ["PYTHONPATH"] = source
    with contextlib.chdir(folder):  # so that rows contain no paths
        for _ in range(asked.rounds):
            for peer in peers(os.cpu_count() or 1):
                measure(peer, python, save)


if __name__ == "__main__":
    main()
