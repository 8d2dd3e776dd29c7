"""Ops on slots: admit requests, append tokens, report to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warpline.kernels.arguments import (
    BITS,
    FLAG,
    FLOAT,
    LONG_BITS,
    Dims,
    Scalar,
    Values,
    count_of,
    distinct,
    index_into,
    pinned,
    reads,
    updates,
)
from warpline.kernels.noise import splitmix
from warpline.kernels.spec import KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LANES = distinct("rows", "slots")


def _some_lanes(dims: Dims, generator: torch.Generator, full: bool) -> Tensor:
    """Draw different lanes; some are -1, which are skipped."""
    import torch

    assert _LANES.made is not None
    lanes = _LANES.made(dims, generator, full)
    return lanes if full else lanes.where(torch.rand(len(lanes), generator=generator) < 0.8, -1)


#: A slot for each row, or -1.
_MAYBE_LANES = Values("int64", made=_some_lanes)


def _slots(rows: int, capacity: int, **more: int) -> Dims:
    return {"rows": rows, "slots": rows + 3, "capacity": capacity, **more}


def _block_per_row(dims: Dims, tunables: Tunables, _dtype: str) -> Launch:
    return Launch(dims["rows"], tunables["block"])


def _append(
    token: Tensor,
    logit: Tensor,
    lanes: Tensor,
    known: Tensor,
    limit: Tensor,
    stops_at_eos: Tensor,
    biased: Tensor,
    presence: Tensor,
    frequency: Tensor,
    tokens: Tensor,
    length: Tensor,
    done: Tensor,
    not_finite: Tensor,
    bias: Tensor,
    counts: Tensor,
    eos: int,
) -> tuple[Tensor, ...]:
    import torch

    tokens, before, was_done = tokens.clone(), length[lanes], done[lanes]
    at = before.clamp(max=tokens.shape[1] - 1)  # a slot that is done may be full
    chosen = torch.where(was_done | (before < known[lanes]), tokens[lanes, at], token)
    tokens[lanes, at] = chosen
    counted, had, place = biased[lanes] & ~was_done, counts[lanes, chosen], (lanes, chosen)
    lowered = torch.where(counted, frequency[lanes] + presence[lanes] * (had == 0), 0)
    bias, counts = bias.index_put(place, bias[place] - lowered), counts.index_put(place, had + counted.int())
    grown = before + ~was_done
    ended = was_done | ((chosen == eos) & stops_at_eos[lanes]) | (grown >= limit[lanes])
    bad = not_finite[lanes] | (~logit.isfinite() & ~was_done)
    records = (t.index_put((lanes,), new) for t, new in ((length, grown), (done, ended), (not_finite, bad)))
    return tokens, *records, bias, counts


def _some_counts(dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
    """Draw counts of tokens that a text has had, or not."""
    import torch

    return torch.randint(3, (dims["slots"], dims["vocab"]), generator=generator).int()


APPEND_TOKEN = KernelSpec(
    name="append_token",
    summary="the end of a step: tokens, lengths, and which sequences are done",
    header="ops/append_token.cuh",
    awaits=True,
    arguments=(
        reads("token", "rows", index_into("vocab")),
        reads("logit", "rows"),
        reads("lanes", "rows", _LANES),
        reads("known", "slots", index_into("capacity"), touched="rows"),
        reads("limit", "slots", count_of("capacity"), touched="rows"),
        reads("stops_at_eos", "slots", FLAG, touched="rows"),
        reads("biased", "slots", FLAG, touched="rows"),
        reads("presence", "slots", FLOAT, touched="rows"),
        reads("frequency", "slots", FLOAT, touched="rows"),
        updates("tokens", "slots capacity", index_into("vocab"), touched="rows 1"),
        updates("length", "slots", index_into("capacity"), touched="rows"),
        updates("done", "slots", FLAG, touched="rows"),
        updates("not_finite", "slots", FLAG, touched="rows"),
        updates("bias", "slots vocab", FLOAT, touched="rows"),
        updates("counts", "slots vocab", Values("int32", made=_some_counts), touched="rows"),
        Scalar("rows"),
        Scalar("capacity"),
        Scalar("vocab"),
        Scalar("eos", -1),
    ),
    tunables={"block": (256, 32)},
    default=lambda _dims, _dtype, _arch: {"block": 256},
    launch=lambda dims, tunables, _dtype: Launch(-(-dims["rows"] // tunables["block"]), tunables["block"]),
    flops=lambda dims: dims["rows"],
    reference=_append,
    dtypes=("fp32",),
    test_dims=tuple(_slots(rows, 20, vocab=30) for rows in (1, 2, 3, 9, 300)),
    bench_dims=(_slots(1, 1024, vocab=50257), _slots(256, 1024, vocab=50257)),
)


def _admit(
    lanes: Tensor,
    whole: Tensor,
    numbers: Tensor,
    flags: Tensor,
    stream: Tensor,
    given: Tensor,
    biased_tokens: Tensor,
    biases: Tensor,
    *state: Tensor,
) -> tuple[Tensor, ...]:
    import torch

    *records, bias, counts, tokens, noise = (t.clone() for t in state)
    lanes, whole, numbers, flags, stream = (t[lanes >= 0] for t in (lanes, whole, numbers, flags, stream))
    no = torch.zeros_like(flags[:, 0])
    brought = (*whole[:, :5].unbind(1), *numbers.unbind(1), *flags.unbind(1), no, no, whole[:, 0])
    for record, values in zip(records, brought, strict=True):
        record[lanes] = values.to(record.dtype)
    for slot, known, begin in zip(lanes.tolist(), *whole[:, [1, 5]].T.tolist(), strict=True):
        tokens[slot, :known] = given[begin : begin + known]
    used = flags[:, 1]
    for slot, begin, count in zip(lanes[used].tolist(), *whole[used][:, 6:].T.tolist(), strict=True):
        bias[slot], counts[slot] = 0, 0
        bias[slot, biased_tokens[begin : begin + count].long()] = biases[begin : begin + count].to(bias.dtype)
    noise[lanes] = splitmix(stream[:, None], torch.arange(noise.shape[1], device=stream.device)).to(torch.int32)
    return *records, bias, counts, tokens, noise


def _admission(rows: int, capacity: int, each: int, vocab: int = 50257, biases: int = 16) -> Dims:
    """Return dimensions of requests with up to `each` tokens and so many biases."""
    return _slots(rows, capacity, given=rows * each, vocab=vocab, biases=rows * biases)


def _brought(dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
    """Draw the integers of requests; the starts of their tokens and biases are consecutive."""
    import torch

    most = dims["given"] // dims["rows"]
    whole = torch.randint(1, most + 1, (dims["rows"], 8), generator=generator)
    whole[:, 5] = whole[:, 1].cumsum(0) - whole[:, 1]
    each = dims["biases"] // dims["rows"]
    whole[:, 6] = each * torch.arange(dims["rows"])
    whole[:, 7] = torch.randint(each + 1, (dims["rows"],), generator=generator)
    return whole


def _different(dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
    """Draw tokens without duplicates within a request."""
    import torch

    each = dims["biases"] // dims["rows"]
    return torch.cat([torch.randperm(dims["vocab"], generator=generator)[:each] for _ in range(dims["rows"])]).int()


ADMIT = KernelSpec(
    name="admit",
    summary="writes new requests into their slots: numbers, known tokens, and the noise of all draws",
    header="ops/admit.cuh",
    arguments=(
        pinned(reads("lanes", "rows", _MAYBE_LANES)),
        # length, known, limit, min_length, top_k, start of tokens, start and number of biases
        pinned(reads("integers", "rows 8", Values("int64", made=_brought))),
        pinned(reads("floats", "rows 6", FLOAT)),  # temperature, top_p, min_p, penalty, presence, frequency
        pinned(reads("flags", "rows 2", FLAG)),  # stops_at_eos, biased
        pinned(reads("stream", "rows", LONG_BITS)),
        pinned(reads("given", "given", BITS)),
        # touched by few rows: most have no biases, and then their slots' rows of both tables do not change
        pinned(reads("biased_tokens", "biases", Values("int32", made=_different), touched="rows")),
        pinned(reads("biases", "biases", FLOAT, touched="rows")),
        *(
            updates(name, "slots", LONG_BITS, touched="rows")
            for name in ("length", "known", "limit", "min_length", "top_k")
        ),
        *(
            updates(name, "slots", FLOAT, touched="rows")
            for name in ("temperature", "top_p", "min_p", "penalty", "presence", "frequency")
        ),
        *(updates(name, "slots", FLAG, touched="rows") for name in ("stops_at_eos", "biased", "done", "not_finite")),
        updates("reported", "slots", LONG_BITS, touched="rows"),
        updates("bias", "slots vocab", FLOAT, touched="rows"),
        updates("counts", "slots vocab", BITS, touched="rows"),
        updates("tokens", "slots capacity", LONG_BITS, touched="given"),
        updates("noise", "slots capacity", BITS, touched="rows capacity"),
        Scalar("capacity"),
        Scalar("vocab"),
    ),
    tunables={"block": (256, 128, 1024)},
    default=lambda _dims, _dtype, _arch: {"block": 256},
    launch=_block_per_row,
    flops=lambda dims: 10 * dims["rows"] * dims["capacity"],
    reference=_admit,
    dtypes=("fp32",),
    test_dims=(
        *(_admission(rows, 20, 12, vocab=31, biases=5) for rows in (1, 2, 3, 9, 300)),
        *(_admission(4, 1024, most, vocab=1030, biases=1024) for most in (1, 257, 1024)),
    ),
    bench_dims=(_admission(1, 1024, 128), _admission(64, 1024, 128)),
)


def _some_fault(_dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
    import torch

    return torch.randint(2, (1,), generator=generator)


def _report(
    tokens: Tensor,
    length: Tensor,
    done: Tensor,
    not_finite: Tensor,
    lanes: Tensor,
    fault: Tensor,
    reported: Tensor,
    news: Tensor,
) -> tuple[Tensor, ...]:
    import torch

    rows, news = (lanes >= 0).nonzero().flatten(), news.clone()
    lanes = lanes[rows]
    room, before = news.shape[1] - 2, reported[lanes]
    count = (length[lanes] - before).clamp(0, room)
    flags = done[lanes] + 2 * not_finite[lanes] + 4 * (fault != 0)
    at = torch.arange(room, device=tokens.device)
    found = tokens[lanes].gather(1, (before[:, None] + at).clamp(max=tokens.shape[1] - 1))
    found = found.where(at < count[:, None], news[rows, 2:])
    news[rows] = torch.cat([count[:, None], flags[:, None], found], 1).int()
    return reported.index_put((lanes,), before + count), news


REPORT = KernelSpec(
    name="report",
    summary="what is new in each lane since the last report, for the host: count, flags, tokens",
    header="ops/report.cuh",
    arguments=(
        reads("tokens", "slots capacity", index_into("capacity"), touched="rows width"),
        reads("length", "slots", count_of("capacity"), touched="rows"),
        reads("done", "slots", FLAG, touched="rows"),
        reads("not_finite", "slots", FLAG, touched="rows"),
        pinned(reads("lanes", "rows", _MAYBE_LANES)),
        reads("fault", "1", Values("int32", made=_some_fault)),
        updates("reported", "slots", index_into("capacity"), touched="rows"),
        pinned(updates("news", "rows width", BITS)),
        Scalar("width"),
        Scalar("capacity"),
    ),
    tunables={"block": (128, 32, 256)},
    default=lambda _dims, _dtype, _arch: {"block": 128},
    launch=_block_per_row,
    flops=lambda dims: dims["rows"] * dims["width"],
    reference=_report,
    dtypes=("fp32",),
    test_dims=(
        *(_slots(rows, 20, width=6) for rows in (1, 2, 3, 9, 300)),
        *(_slots(9, 1024, width=width) for width in (2, 3, 130, 1026)),
    ),
    bench_dims=(_slots(1, 1024, width=34), _slots(64, 1024, width=34)),
)
