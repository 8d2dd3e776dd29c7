"""The figures of a row, from measured times: medians, rates, and shares of what the machine can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from warpline.bench import budget
from warpline.bench import methods as known
from warpline.bench.protocol import Sample
from warpline.bench.workloads import Case
from warpline.config import ModelConfig
from warpline.model import cost

Row = dict[str, Any]

#: The note of a row where the time from the first token to the last is smaller than the noise.
UNSURE = "the time from first to last token is less than the noise: more --repetitions, or more tokens"


@dataclass(frozen=True, slots=True)
class Times:
    """Times to the first token and of whole generations. Where the counts match, each pair was measured together."""

    first: Sample
    whole: Sample

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last: the median over pairs, which share the state of the machine. None
        where noise exceeds it, so that the first token would come after the last."""
        firsts, wholes = self.first.seconds, self.whole.seconds
        if len(firsts) != len(wholes):
            firsts = (self.first.median,) * len(wholes)
        decode = Sample(tuple(whole - first for first, whole in zip(firsts, wholes, strict=True))).median
        return decode if decode > 1e-6 and self.first.median < self.whole.median else None


def figures(case: Case, config: ModelConfig, times: Times, name: str, limits: dict[str, float]) -> Row:
    """Return the figures of a method's row; all times are medians."""
    kind = known.find(name)
    case = replace(case, dtype=kind.stored or case.dtype)
    counted = kind.exact or kind.stored or kind.kv_stored  # others move fewer bytes than the dtype says
    whole, first = times.whole, times.first
    row: Row = dict(whole.figures())
    if case.kind == "prefill":
        work = cost.prefill(config, case.dtype, batch=case.batch, tokens=case.prompt, kv_dtype=kind.kv_stored)
        row["tokens_per_second"] = round(case.batch * case.prompt / whole.median, 2)
        row["tflop_s"] = round(cost.total_flops(work) / whole.median / 1e12, 3)
        if counted:
            best = budget.seconds_at_best(case, config, *limits.values(), kv_dtype=kind.kv_stored)
            row["percent_of_limit"] = round(100 * best / whole.median, 2)
        return row
    row["tokens_per_second"] = round(case.batch * case.new / whole.median, 2)
    decode = times.decode
    if case.new > 1 and decode is None:
        row["unsure"] = UNSURE
        if case.kind == "decode":
            del row["tokens_per_second"]
        return row
    row["first_token_seconds"] = round(first.median, 7)
    if decode is not None and case.new > 1:
        steps = case.new - 1
        if case.kind == "decode":
            row["tokens_per_second"] = round(case.batch * steps / decode, 2)
        row["us_per_token"] = round(1e6 * decode / steps, 3)
        if counted:
            row |= decode_rates(case, config, row["us_per_token"], limits["read_gb_s"], kind.kv_stored)
    return row


def decode_rates(
    case: Case, config: ModelConfig, us_per_token: float, read_gb_s: float, kv_dtype: str | None = None
) -> Row:
    """Return the GB/s of a step and its share of the read bandwidth, from the bytes it must move. Of the LM head these
    are the codes, because the texts are greedy."""
    steps = case.new - 1
    lengths = [case.prompt] * case.batch
    moved = cost.decode_bytes(config, case.dtype, lengths=lengths, steps=steps, screened=True, kv_dtype=kv_dtype)
    gb_s = moved / steps / us_per_token / 1e3
    return {"gb_s": round(gb_s, 2), "percent_of_limit": round(100 * gb_s / read_gb_s, 2)}
