"""Climb a ladder on this GPU: every rung is checked against float64 first, then timed and compared with the roof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from warpline.bench.kernels import rates
from warpline.bench.rows import provenance
from warpline.bench.timing import LAUNCHES, Timing, copy_bandwidth, product_rate, rotating_sets, time_launches
from warpline.errors import DeviceError
from warpline.kernels import launch
from warpline.kernels.arguments import Dims
from warpline.kernels.compile import compile_many
from warpline.kernels.ladder.rung import Ladder, Rung
from warpline.kernels.launch import TORCH_TYPES
from warpline.kernels.verify import Trial, random_inputs

Row = dict[str, Any]
#: In ms: from _SLOW_MS per launch a cold cache does not matter, and launches of _PATIENCE_MS together are enough.
_SLOW_MS, _PATIENCE_MS = 1.0, 50.0


def steps(ladder: Ladder) -> int:
    """Return the number of rows of a climb."""
    return len(ladder.rungs) + len(ladder.yardsticks) * len({rung.dtype for rung in ladder.rungs})


def climb(ladders: Sequence[tuple[Ladder, Dims]]) -> Iterator[Row]:
    """Yield one row per rung and yardstick, ladder by ladder; raise if a rung computes a wrong result."""
    if not torch.cuda.is_available():
        raise DeviceError("timing a ladder needs a CUDA GPU: without one it is compiled, listed and replayed (--from)")
    origin = provenance() | {"copy_gb_s": round(copy_bandwidth(), 1)}
    peaks: dict[str, float] = {}
    arch = launch.arch_of(torch.cuda.current_device())
    _compile(ladders, arch)
    for ladder, dims in ladders:
        for rung in ladder.rungs:
            if rung.dtype not in peaks:
                peaks[rung.dtype] = product_rate(TORCH_TYPES[rung.dtype])
        try:
            yield from (origin | row for row in _climb(ladder, dims, arch, origin["copy_gb_s"], peaks))
        except torch.OutOfMemoryError:
            raise DeviceError(f"{ladder.name} needs more memory than is free here: choose a smaller --shape") from None


def _climb(ladder: Ladder, dims: Dims, arch: str, copy_gb_s: float, peaks: dict[str, float]) -> Iterator[Row]:
    shape = ladder.shape_of(dims)
    sets = {dtype: _Sets(ladder, dims, dtype) for dtype in dict.fromkeys(rung.dtype for rung in ladder.rungs)}
    below: float | None = None  # µs of the last possible rung before this one that is not a variant
    for rung in ladder.rungs:
        row: Row = {
            "ladder": ladder.name,
            "shape": shape,
            "rung": rung.name,
            "kind": "variant" if rung.variant else "rung",
            "kernel": rung.spec.name,
            "arch": arch,
            "dtype": rung.dtype,
            "dims": rung.dims(dims),
        }
        if not rung.allows(dims, arch):
            yield row | {"status": "impossible"}
            continue
        check(rung, (*ladder.odd_dims, dims), arch)
        timing = sets[rung.dtype].time(rung)
        yield row | {
            "status": "ok",
            **_microseconds(timing),
            "gain": None if below is None else round(below / timing.median, 4),
            **rates(rung.spec, rung.dtype, rung.dims(dims), timing.median, copy_gb_s, peaks[rung.dtype]),
        }
        if not rung.variant:
            below = timing.median
    top = ladder.climb[-1].spec
    for name, do in ladder.yardsticks.items():
        for dtype, buffers in sets.items():
            timing = buffers.time_other(do)
            row = {"ladder": ladder.name, "shape": shape, "rung": name, "kind": "yardstick", "dtype": dtype}
            figures = rates(top, dtype, dims, timing.median, copy_gb_s, peaks[dtype])
            yield row | {"dims": dict(dims), "status": "ok", **_microseconds(timing), "gain": None, **figures}


def check(rung: Rung, shapes: Sequence[Dims], arch: str, seed: int = 1) -> None:
    """Compare the rung with float64 at every shape where it exists; raise with the difference if it is wrong."""
    for dims in shapes:
        if rung.allows(dims, arch):
            Trial(rung.spec, rung.dtype, rung.dims(dims), seed).check()


def _compile(ladders: Sequence[tuple[Ladder, Dims]], arch: str) -> None:
    """Compile the rungs at all their shapes, on all cores."""
    places = [(rung, d) for ladder, dims in ladders for rung in ladder.rungs for d in (*ladder.odd_dims, dims)]
    compile_many(list({(rung.compiled_as(dims, arch), arch): None for rung, dims in places if rung.allows(dims, arch)}))


def _microseconds(timing: Timing) -> Row:
    return {"us": round(timing.median, 3), "us_p20": round(timing.p20, 3), "us_p80": round(timing.p80, 3)}


class _Sets:
    """The inputs of one dtype, shared by all rungs and yardsticks that compute in it."""

    def __init__(self, ladder: Ladder, dims: Dims, dtype: str):
        self._dims, top = dims, ladder.climb[-1].spec
        count = rotating_sets(top.bytes(dims, dtype))
        self._inputs = [random_inputs(top, dtype, dims, seed, full=True) for seed in range(count)]
        self._numbers = top.number_values(dims)

    def time(self, rung: Rung) -> Timing:
        """Time a rung. Its constant memory always holds the first set, because it stays loaded between launches."""
        numbers = rung.spec.number_values(rung.dims(self._dims))
        calls = [launch.Call(rung.spec, self._of(rung, inputs), numbers=numbers) for inputs in self._inputs]
        return _timed(lambda i: calls[i].launch(), len(calls))

    def _of(self, rung: Rung, inputs: list[Tensor]) -> list[Tensor]:
        kept = zip(rung.spec.inputs, self._inputs[0], inputs, strict=True)
        return [first if buffer.role == "constant" else own for buffer, first, own in kept]

    def time_other(self, do: Callable[..., Any]) -> Timing:
        """Time a yardstick."""
        return _timed(lambda i: do(*self._inputs[i], **self._numbers), len(self._inputs))


def _timed(call: Callable[[int], object], sets: int) -> Timing:
    """Time like `time_launches`, but with fewer launches where one takes longer than `_SLOW_MS`."""
    call(0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(0)
    end.record()
    torch.cuda.synchronize()
    once = begin.elapsed_time(end)
    if once < _SLOW_MS:
        return time_launches(call, sets)
    return time_launches(call, 2, min(LAUNCHES, max(2, int(_PATIENCE_MS / once))))
