"""Draw the loss curve of a training run.

python -m tools.train_stories.plot --log run/log.jsonl --out loss.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def plot(log: Path, out: Path) -> None:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    validated = [row for row in rows if "validation_loss" in row]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    axes.plot([row["tokens"] / 1e6 for row in rows], [row["loss"] for row in rows], color="#9bb8d3", label="training")
    axes.plot(
        [row["tokens"] / 1e6 for row in validated],
        [row["validation_loss"] for row in validated],
        color="#c0392b",
        marker="o",
        markersize=3,
        label=f"held out (last: {validated[-1]['validation_loss']:.3f})",
    )
    axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(1, 3), title="Training the story model")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    plot(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
