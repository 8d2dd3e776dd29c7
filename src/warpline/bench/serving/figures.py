"""Turns answers into a row. Names and formulas are those of `vllm bench serve`, so that its tools read these rows."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any

from warpline.bench.serving.answers import TOO_MANY, Answer
from warpline.bench.serving.client import Raw
from warpline.bench.serving.load import Load
from warpline.errors import ConfigError, one_of

Row = dict[str, Any]
#: The metrics: their names in rows and in --goodput.
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)


def goals(text: str | None) -> dict[str, float]:
    """Parse "ttft:50,tpot:5" into milliseconds by metric."""
    found = {}
    for part in (text or "").replace(",", " ").split():
        name, _, value = part.partition(":")
        one_of(name, METRICS, "metric of --goodput")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput takes milliseconds, as in ttft:50,tpot:5, not '{part}'") from None
    return found


def refusals(raws: Sequence[Raw]) -> Row:
    """Return how many requests were refused for overload, and how soon in ms; empty if none were."""
    waited = sorted(1e3 * (raw.ended - raw.sent) for raw in raws if raw.status == TOO_MANY)
    spans = {f"p{share}_refusal_ms": round(percentile(waited, share), 4) for share in PERCENTILES if waited}
    return {"refused": len(waited), **spans} if waited else {}


def figures(found: Sequence[Answer | str], load: Load, duration: float, cpu: float, goals: dict[str, float]) -> Row:
    """Return the figures of a run; times in ms."""
    good = [one for one in found if isinstance(one, Answer)]
    errors = collections.Counter(one for one in found if isinstance(one, str))
    tokens, prompts = sum(one.tokens for one in good), sum(one.prompt_tokens for one in good)
    row: Row = {
        "num_prompts": load.requests,
        "completed": len(good),
        "failed": len(found) - len(good),
        "errors": dict(errors.most_common(5)),
        "duration": round(duration, 6),
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "request_throughput": round(len(good) / duration, 3),
        "output_throughput": round(tokens / duration, 2),
        "total_token_throughput": round((tokens + prompts) / duration, 2),
        "tokens_per_chunk": round(tokens / max(1, sum(len(one.gaps) + 1 for one in good)), 2),
        "counted": sorted({one.counted for one in good}),
        "client_cpu_share": round(cpu / duration, 4),
        "client_us_per_token": round(1e6 * cpu / max(1, tokens), 3),
    }
    if goals:
        row["goodput_goals_ms"] = goals
        row["request_goodput"] = round(sum(_meets(one, goals) for one in good) / duration, 3)
    for name in METRICS:
        values = [1e3 * value for one in good for value in _values(one, name)]
        row |= _summary(name, values) if values else {}
    return row


def _values(one: Answer, name: str) -> Sequence[float]:
    if name == "itl":
        return one.gaps
    value = {"ttft": one.ttft, "tpot": one.tpot, "e2el": one.whole}[name]
    return () if value is None else (value,)


def _meets(one: Answer, goals: dict[str, float]) -> bool:
    """Whether the answer meets every goal; for gaps between chunks the longest counts."""
    return all(1e3 * max(_values(one, name), default=0.0) <= most for name, most in goals.items())


def _summary(name: str, values: list[float]) -> Row:
    ordered = sorted(values)
    found = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"std_{name}_ms": statistics.pstdev(values),
        **{f"p{share}_{name}_ms": percentile(ordered, share) for share in PERCENTILES},
    }
    return {key: round(value, 4) for key, value in found.items()} | {
        f"median_{name}_ms": round(percentile(ordered, 50), 4)
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Interpolate between the two values around the percentile, as numpy does; `share` is 0 to 100."""
    place = share / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
