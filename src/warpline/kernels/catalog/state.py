"""What happens to slots: requests come in, tokens are appended, and the host is told."""

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
    """As many, but some say nothing."""
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
    tokens: Tensor,
    length: Tensor,
    done: Tensor,
    broken: Tensor,
    eos: int,
) -> tuple[Tensor, ...]:
    import torch

    tokens, before, was_done = tokens.clone(), length[lanes], done[lanes]
    at = before.clamp(max=tokens.shape[1] - 1)  # a slot that is done may be full
    chosen = torch.where(was_done | (before < known[lanes]), tokens[lanes, at], token)
    tokens[lanes, at] = chosen
    grown = before + ~was_done
    ended = was_done | ((chosen == eos) & stops_at_eos[lanes]) | (grown >= limit[lanes])
    odd = broken[lanes] | (~logit.isfinite() & ~was_done)
    return tokens, *(t.index_put((lanes,), new) for t, new in ((length, grown), (done, ended), (broken, odd)))


APPEND_TOKEN = KernelSpec(
    name="append_token",
    summary="the end of a step: tokens, lengths, and which sequences are done",
    header="ops/append_token.cuh",
    arguments=(
        reads("token", "rows", index_into("capacity")),
        reads("logit", "rows"),
        reads("lanes", "rows", _LANES),
        reads("known", "slots", index_into("capacity"), touched="rows"),
        reads("limit", "slots", count_of("capacity"), touched="rows"),
        reads("stops_at_eos", "slots", FLAG, touched="rows"),
        updates("tokens", "slots capacity", index_into("capacity"), touched="rows 1"),
        updates("length", "slots", index_into("capacity"), touched="rows"),
        updates("done", "slots", FLAG, touched="rows"),
        updates("broken", "slots", FLAG, touched="rows"),
        Scalar("rows"),
        Scalar("capacity"),
        Scalar("eos", -1),
    ),
    tunables={"block": (256, 32)},
    default=lambda _dims, _dtype, _arch: {"block": 256},
    launch=lambda dims, tunables, _dtype: Launch(-(-dims["rows"] // tunables["block"]), tunables["block"]),
    flops=lambda dims: dims["rows"],
    reference=_append,
    dtypes=("fp32",),
    test_dims=tuple(_slots(rows, 20) for rows in (1, 2, 3, 9, 300)),
    bench_dims=(_slots(1, 1024), _slots(256, 1024)),
)


def _admit(
    lanes: Tensor,
    whole: Tensor,
    numbers: Tensor,
    flags: Tensor,
    stream: Tensor,
    given: Tensor,
    *state: Tensor,
) -> tuple[Tensor, ...]:
    import torch

    *records, tokens, noise = (t.clone() for t in state)
    lanes, whole, numbers, flags, stream = (t[lanes >= 0] for t in (lanes, whole, numbers, flags, stream))
    no = torch.zeros_like(flags)
    brought = (*whole[:, :5].unbind(1), *numbers.unbind(1), flags, no, no, whole[:, 0])
    for record, values in zip(records, brought, strict=True):
        record[lanes] = values.to(record.dtype)
    for slot, known, begin in zip(lanes.tolist(), *whole[:, [1, 5]].T.tolist(), strict=True):
        tokens[slot, :known] = given[begin : begin + known]
    noise[lanes] = splitmix(stream[:, None], torch.arange(noise.shape[1], device=stream.device)).to(torch.int32)
    return *records, tokens, noise


def _brought(dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
    """Any numbers, but tokens lie one behind the other."""
    import torch

    most = dims["given"] // dims["rows"]
    whole = torch.randint(1, most + 1, (dims["rows"], 6), generator=generator)
    whole[:, 5] = whole[:, 1].cumsum(0) - whole[:, 1]
    return whole


ADMIT = KernelSpec(
    name="admit",
    summary="what new requests bring, into their slots: numbers, known tokens, and the noise of all draws",
    header="ops/admit.cuh",
    arguments=(
        pinned(reads("lanes", "rows", _MAYBE_LANES)),
        # length, known, limit, min_length, top_k, begin
        pinned(reads("whole", "rows 6", Values("int64", made=_brought))),
        pinned(reads("numbers", "rows 4", FLOAT)),  # temperature, top_p, min_p, penalty
        pinned(reads("flags", "rows", FLAG)),  # stops_at_eos
        pinned(reads("stream", "rows", LONG_BITS)),
        pinned(reads("given", "given", BITS)),
        *(
            updates(name, "slots", LONG_BITS, touched="rows")
            for name in ("length", "known", "limit", "min_length", "top_k")
        ),
        *(updates(name, "slots", FLOAT, touched="rows") for name in ("temperature", "top_p", "min_p", "penalty")),
        *(updates(name, "slots", FLAG, touched="rows") for name in ("stops_at_eos", "done", "broken")),
        updates("reported", "slots", LONG_BITS, touched="rows"),
        updates("tokens", "slots capacity", LONG_BITS, touched="given"),
        updates("noise", "slots capacity", BITS, touched="rows capacity"),
        Scalar("capacity"),
    ),
    tunables={"block": (256, 128, 1024)},
    default=lambda _dims, _dtype, _arch: {"block": 256},
    launch=_block_per_row,
    flops=lambda dims: 10 * dims["rows"] * dims["capacity"],
    reference=_admit,
    dtypes=("fp32",),
    test_dims=(
        *(_slots(rows, 20, given=12 * rows) for rows in (1, 2, 3, 9, 300)),
        *(_slots(4, 1024, given=4 * most) for most in (1, 257, 1024)),
    ),
    bench_dims=(_slots(1, 1024, given=128), _slots(64, 1024, given=64 * 128)),
)


def _some_fault(_dims: Dims, generator: torch.Generator, _full: bool) -> Tensor:
    import torch

    return torch.randint(2, (1,), generator=generator)


def _report(
    tokens: Tensor,
    length: Tensor,
    done: Tensor,
    broken: Tensor,
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
    flags = done[lanes] + 2 * broken[lanes] + 4 * (fault != 0)
    at = torch.arange(room, device=tokens.device)
    found = tokens[lanes].gather(1, (before[:, None] + at).clamp(max=tokens.shape[1] - 1))
    found = found.where(at < count[:, None], news[rows, 2:])
    news[rows] = torch.cat([count[:, None], flags[:, None], found], 1).int()
    return reported.index_put((lanes,), before + count), news


REPORT = KernelSpec(
    name="report",
    summary="what has come of each lane since the last report, for the host: count, flags, new tokens",
    header="ops/report.cuh",
    arguments=(
        reads("tokens", "slots capacity", index_into("capacity"), touched="rows width"),
        reads("length", "slots", count_of("capacity"), touched="rows"),
        reads("done", "slots", FLAG, touched="rows"),
        reads("broken", "slots", FLAG, touched="rows"),
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
