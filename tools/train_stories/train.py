"""Train the story model on the encoded corpus: the project's own GPT-2, AdamW, one schedule, no tricks.

python -m tools.train_stories.train --data data --out run --epochs 4
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from warpline.config import ModelConfig
from warpline.model.gpt2 import GPT2
from warpline.model.tokenizer import END_OF_TEXT, Tokenizer
from warpline.model.weights import Weights, checkpoint

CONFIG = ModelConfig(n_layer=8, n_head=4, n_embd=256, n_positions=512)
WARM_UP = 0.02  # share of the steps in which the learning rate rises
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
LOG_EVERY, VALIDATE_EVERY = 20, 500  # steps
VALIDATION_WINDOWS = 256


def windows(starts: np.ndarray, total: int, size: int) -> np.ndarray:
    """Where to cut: every window begins with a story, and one that is cut off begins the next window again."""
    cuts, place = [], 0
    while place + size + 1 <= total:
        cuts.append(place)
        following = int(starts[np.searchsorted(starts, place + size, side="right") - 1])
        place = following if following > place else place + size  # a story longer than a window goes on
    return np.array(cuts)


def batches(tokens: Tensor, cuts: np.ndarray, size: int, rows: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Rows of size + 1 tokens: inputs and, shifted by one, targets. Every epoch is shuffled anew."""
    rng = np.random.default_rng(seed)
    reach = torch.arange(size + 1, device=tokens.device)
    for _ in range(epochs):
        order = torch.from_numpy(cuts[rng.permutation(len(cuts))]).to(tokens.device)
        for first in range(0, len(order) - rows + 1, rows):
            yield tokens[order[first : first + rows, None] + reach].long()


def initialise(model: GPT2, seed: int) -> None:
    """As GPT-2 was: small normal matrices, smaller where many layers add up on the residual path."""
    torch.manual_seed(seed)
    shrink = 1 / math.sqrt(2 * model.config.n_layer)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.02 * (shrink if name.endswith("c_proj.weight") else 1))
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short rise, then a cosine down to nothing."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def held_out_windows(path: Path, size: int) -> Tensor:
    """The held-out stories, joined and cut like the training text."""
    tokenizer = Tokenizer.gpt2()
    (end,) = tokenizer.encode(END_OF_TEXT, special=True)
    stories = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ids = [[*story, end] for story in tokenizer.encode_many(stories)]
    tokens = torch.tensor([token for story in ids for token in story])
    cuts = windows(np.cumsum([0, *(len(story) for story in ids[:-1])]), len(tokens), size)[:VALIDATION_WINDOWS]
    return torch.stack([tokens[cut : cut + size + 1] for cut in cuts])


def train(
    data: Path, out: Path, epochs: int, rows: int, peak: float, seed: int, device: str, config: ModelConfig
) -> None:
    """Train, log and save."""
    out.mkdir(parents=True, exist_ok=True)
    size, cuda = config.n_positions, device != "cpu"
    tokens = torch.from_numpy(np.load(data / "tokens.npy").astype(np.int32)).to(device)
    cuts = windows(np.load(data / "starts.npy"), len(tokens), size)
    validation = held_out_windows(data / "held_out.jsonl", size).to(device)
    steps = epochs * (len(cuts) // rows)
    if not steps or not len(validation):
        raise SystemExit(f"{data} holds {len(cuts)} training and {len(validation)} held-out windows: sample more text")
    model = GPT2(config).to(device)
    initialise(model, seed)

    def loss_of(batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    compiled = torch.compile(loss_of) if cuda else loss_of
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=peak, betas=BETAS, fused=cuda)
    half = torch.autocast(device, torch.bfloat16, enabled=cuda)

    @torch.no_grad()
    def validate() -> float:
        with half:
            losses = [float(compiled(part)) for part in validation.split(rows) if len(part) == rows]
        return sum(losses) / len(losses) if losses else float(loss_of(validation))

    print(f"{len(tokens):,} tokens, {len(cuts):,} windows, {steps:,} steps of {rows * size:,} tokens")
    start = time.monotonic()
    recent: list[Tensor] = []
    with (out / "log.jsonl").open("w", encoding="utf-8") as log:
        for step, batch in enumerate(batches(tokens, cuts, size, rows, epochs, seed)):
            rate = learning_rate(step, steps, peak)
            for group in optimiser.param_groups:
                group["lr"] = rate
            with half:
                loss = compiled(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            recent.append(loss.detach())
            last = step == steps - 1
            if step % LOG_EVERY == 0 or last:
                seconds = time.monotonic() - start
                row = {
                    "step": step,
                    "tokens": (step + 1) * rows * size,
                    "loss": float(torch.stack(recent).mean()),
                    "learning_rate": rate,
                    "seconds": round(seconds, 1),
                }
                recent.clear()
                if step % VALIDATE_EVERY == 0 or last:
                    row["validation_loss"] = validate()
                log.write(json.dumps(row) + "\n")
                log.flush()
                if "validation_loss" in row or step % (5 * LOG_EVERY) == 0:
                    print(f"{row}  {row['tokens'] / seconds:,.0f} tokens/s", flush=True)
    save(model, out / "stories")


def save(model: GPT2, folder: Path) -> None:
    """A Hugging Face folder with fp16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().half().cpu() for name, value in model.state_dict().items()}
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=1) + "\n")
    save_file(checkpoint(Weights("stories", model.config, tensors)), folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that encode wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log and the model")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=128, help="windows per step")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    train(**vars(parser.parse_args()), config=CONFIG)


if __name__ == "__main__":
    main()
