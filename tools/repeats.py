"""Whether an executor repeats itself to the bit while other processes share the GPU, which switches between them:

    python -m tools.repeats persistent --batch 8 --processes 8 --seconds 90

Every process generates the same texts round after round. If the KV cache of a round differs from that of the first, the
first position and layer that differ are printed: the error occurred in the layer before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections.abc import Iterator

import torch

from warpline import SamplingParams
from warpline.engine.executors import create
from warpline.engine.request import Request, Span
from warpline.model.weights import load

PROMPT, STEPS = 16, 100


def rounds(name: str, batch: int, new: int, seconds: float, process: int) -> None:
    """Run the rounds of one process."""
    weights = load("random:gpt2", dtype="fp16", device="cuda")
    executor = create(name, weights, torch.device("cuda:0"), "fp16")
    slots, draw = executor.allocate(batch, PROMPT + new), random.Random(1)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=new)
    prompts = [[draw.randrange(weights.config.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
    asked = [Request(prompt, params, 0, i, PROMPT + new) for i, prompt in enumerate(prompts)]
    end, count, wrong, expected = time.monotonic() + seconds, 0, 0, None
    while time.monotonic() < end:
        lanes = slots.admit(asked)
        executor.prefill(slots, [Span(slot, 0, PROMPT, (slot,)) for slot in lanes])
        for left in range(new - 1, 0, -STEPS):
            executor.decode(slots, lanes, min(STEPS, left))
        slots.report(lanes, slots.capacity).wait()
        found = torch.stack([cache[:, :batch, :, : PROMPT + new - 1] for cache in (slots.cache.k, slots.cache.v)])
        found = found.view(torch.int16)
        expected = found if expected is None else expected
        lines = list(differences(found, expected))
        wrong += bool(lines)
        for line in lines:
            print(f"process {process}, round {count}, {line}", flush=True)
        for slot in lanes:
            slots.release(slot)
        count += 1
    print(f"process {process}: {wrong} of {count} rounds differ from the first", flush=True)


def differences(found: torch.Tensor, expected: torch.Tensor) -> Iterator[str]:
    """Yield a line for each slot with differing bits, from bits [k and v, layer, slot, head, position, depth]."""
    differ = found != expected
    for slot in range(differ.shape[2]):
        where = differ[:, :, slot].any(dim=-1)  # k and v, layer, head, position
        positions = where.any(dim=(0, 1, 2)).nonzero().flatten()
        if not len(positions):
            continue
        position = int(positions[0])
        layer = int(where[..., position].any(dim=(0, 2)).nonzero().flatten()[0])
        heads = where[:, layer, :, position].any(dim=0).nonzero().flatten().tolist()
        values = int(differ[:, layer, slot, :, position].sum())
        yield f"slot {slot}: from position {position} on, first in layer {layer}, heads {heads}, {values} values"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executor")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=90)
    given = parser.parse_args()
    spawned = multiprocessing.get_context("spawn")
    shared = (given.executor, given.batch, given.new, given.seconds)
    processes = [spawned.Process(target=rounds, args=(*shared, number)) for number in range(given.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
