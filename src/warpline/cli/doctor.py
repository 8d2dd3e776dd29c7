"""`warpline doctor`: reports what this machine has, and what would make it faster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from warpline.progress import progress
from warpline.tables import say, show

if TYPE_CHECKING:
    from warpline.hardware import Device
    from warpline.kernels.choices import Summary

#: Short form of docs/determinism.md.
_BITS = (
    "whatever runs beside a text, it is the same to the bit on a CPU, the same on a GPU in fp32, and nearly always in "
    "other dtypes; --deterministic batch keeps token ids and log-probabilities to the bit"
)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has and lacks. Measures memory bandwidth and remembers it."""
    from warpline.cli import survey
    from warpline.kernels import choices

    with progress("Measuring memory"):
        found = survey.take()
    stored = [choices.summary(device.name) for device in found.devices if device.kind == "cuda"]
    slots = [_slots(device, i - 1) for i, device in enumerate(found.devices)]  # the CPU is the first device
    if as_json:
        more = {"choices": [one.as_dict() for one in stored], "slots": slots}
        typer.echo(json.dumps(found.as_dict() | more, indent=1))
        return

    rows = [("GPU" if device.kind == "cuda" else "CPU", _describe(device)) for device in found.devices]
    if len(found.devices) == 1:
        rows.append(("GPU", "none that torch can use"))
    rows += [(name, version or "not found") for name, version in found.software.items()]
    rows += [("tuned", _count(one)) for one in stored]
    for device, counts in zip(found.devices, slots, strict=True):
        known = ", ".join(f"{count} of {model}" for model, count in counts.items())
        rows.append(("at once", f"{known} on {device.name}, by its free memory; others wait (max_batch changes it)"))
    rows.append(("same bits", _BITS))
    rows.append(("cache", f"{found.cache_folder} ({found.cache_bytes / 1e6:,.1f} MB)"))
    for extra, missing in found.extras.items():
        rows.append((f"[{extra}]", f"lacks {', '.join(missing)}" if missing else "is there"))
    show(("", ""), rows)
    for line in found.advice:
        say(f"\n→ {line}")


def _describe(device: Device) -> str:
    unit = "SMs" if device.kind == "cuda" else "cores"
    memory = f"{device.memory_gb:,.0f} GB" if device.memory_gb is not None else "memory n/a"
    spec = f"{device.spec_bandwidth:,.0f} GB/s by its datasheet" if device.spec_bandwidth is not None else "spec n/a"
    measured = f"{device.measured_bandwidth:,.1f} GB/s read, measured" if device.measured_bandwidth else "not measured"
    return f"{device.name} ({device.arch}, {device.units} {unit}, {memory}; {measured}, {spec})"


def _slots(device: Device, index: int) -> dict[str, int]:
    """Return the default number of sequences at once for a small and a large model; on a GPU also with an int8 KV
    cache."""
    from warpline.config import FAMILY
    from warpline.engine.llm import default_slots

    dtype, name = ("fp16", f"cuda:{index}") if device.kind == "cuda" else ("fp32", "cpu")
    counts = {f"{model} {dtype}": default_slots(FAMILY[model][1], dtype, name) for model in ("gpt2", "gpt2-xl")}
    if device.kind == "cuda":
        coded = f"gpt2-xl {dtype} with an int8 KV cache"
        counts[coded] = default_slots(FAMILY["gpt2-xl"][1], dtype, name, "int8")
    return counts


def _count(stored: Summary) -> str:
    """Describe the choices of tunables for one GPU."""
    shipped = f"{stored.shipped} shipped" + (f" ({stored.projected} projected)" if stored.projected else "")
    stale = f", {stored.stale} stale: run 'warpline tune'" if stored.stale else ""
    return f"{stored.gpu}: {stored.swept} choices of your own sweep, {shipped}{stale} ({stored.file})"
