"""`warpline hf`: shows what patching a Hugging Face GPT-2 replaces, changes and gains."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warpline.cli.common import NEW_TOKENS, PROMPT_TOKENS, Device, Dtype
from warpline.config import EngineConfig
from warpline.errors import ConfigError
from warpline.progress import progress
from warpline.tables import say, show


def hf(
    model: Annotated[str, typer.Argument(help="As for generate: a name, a folder, a hub id, random:gpt2.")],
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences side by side.")] = 1,
    prompt: Annotated[int, typer.Option(PROMPT_TOKENS, "--prompt", help="Tokens of the prompt.")] = 16,
    new: Annotated[int, typer.Option(NEW_TOKENS, "--new", help="Tokens to generate.")] = 100,
    fast_math: Annotated[bool, typer.Option(help="GELU with the GPU's approximate tanh.")] = False,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds in which the ways take turns.")] = 7,
    budget: Annotated[float, typer.Option(min=0, help="Seconds a table may take beyond three rounds.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Patch a transformers model and measure the gain. Print what was replaced, how far the logits moved, and the speed
    before and after, measured in turns."""
    asked = EngineConfig(device=device, dtype=dtype)

    with progress("Loading transformers"):
        import torch

        from warpline.hf.measure import Measure
        from warpline.model import weights

    found = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(found if asked.device == "auto" else asked.device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA GPU that torch can use: use --device cpu")
    kind = asked.dtype if asked.dtype != "auto" else "fp16" if where.type == "cuda" else "fp32"
    with progress("Patching and measuring"):
        measure = Measure(weights.load(model, dtype=kind, device=str(where)), where, fast_math=fast_math)
        result = measure.run(batch=batch, prompt=prompt, new=new, repetitions=repetitions, budget_seconds=budget)
    report = result.report
    if as_json:
        names = ("what", "way", "tokens_per_second", "speed_up")
        rows = [{**{n: getattr(row, n) for n in names}, "seconds": row.sample.seconds} for row in result.rows]
        patched = {name: getattr(report, name) for name in report.__slots__ if name != "calls"}
        typer.echo(json.dumps({"model": model, **patched, "same_tokens": result.same_tokens, "rows": rows}))
        return
    say(f"{model}, {report}\n  {100 * result.same_tokens:.1f} % of the generated tokens are the unpatched model's\n")
    show(
        ("what", "way", "median ms", "tok/s", "speed-up"),
        [
            (r.what, r.way, f"{1e3 * r.sample.median:,.2f}", f"{r.tokens_per_second:,.1f}", f"{r.speed_up:.2f}×")
            for r in result.rows
        ],
    )
