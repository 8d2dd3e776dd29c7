"""Projections for GPUs without measurements, from the compiler's report and the roofline, and marked as such.

Only products in tiles are modelled: how much of their tiles is padding, how evenly they fill the multiprocessors, and
what they move through L2 and shared memory follow from the tunables. The candidates of other kernels differ in how
their latencies overlap, which is not modelled, so these keep their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warpline.config import DTYPE_BYTES
from warpline.errors import ConfigError, KernelError
from warpline.hardware import ARCH_LIMITS, Device
from warpline.kernels.choices import PROJECTED
from warpline.kernels.compile import Report
from warpline.tune.candidates import Case, Values, blocks_held, changed, hopeless, impossible
from warpline.tune.journal import Attempt
from warpline.tune.sweep import Ahead, Result

#: Candidates that are compiled: the best by the model, before it has a report.
FINALISTS = 6
#: Most tunables in which a candidate differs from the default.
APART = 3
#: Assumptions: L2 is this many times as fast as memory, and shared memory delivers this many bytes in the time of 1,024
#: operations of a tensor core (128 bytes from sm_80 on, where it does 2,048 in that time).
L2_OVER_MEMORY, SHARED_BYTES, OPERATIONS = 4.0, 64, 1024
#: Microseconds of a read from memory: the bytes that memory delivers in this time must be in flight.
LATENCY = 0.6
#: The share of a multiprocessor's threads that must be resident to keep it busy.
ENOUGH_THREADS = 0.25


def project(cases: Sequence[Case], gpu: Device, advance: Callable[[float], None] = lambda _: None) -> list[Result]:
    """Return a result for each case, with the model's microseconds in place of measured ones."""
    if gpu.arch not in ARCH_LIMITS or None in (gpu.units, gpu.spec_bandwidth, gpu.tensor_tflops, gpu.fp32_tflops):
        raise ConfigError(f"{gpu.name} cannot be projected: the kernels are not made for it, or its peaks are unknown")
    compiled = Ahead()
    try:
        planned = [(Result(case, PROJECTED), _finalists(case, gpu)) for case in cases]
        for result, finalists in planned:
            for values in finalists:
                compiled.submit(result.case, values)
        for result, finalists in planned:
            _judge(result, finalists, gpu, compiled)
            advance(1)
    finally:
        compiled.stop()
    return [result for result, _ in planned]


def _finalists(case: Case, gpu: Device) -> list[Values]:
    default = case.default
    if not is_told_apart(case):
        return [default]
    known = [values for apart in range(1, APART + 1) for values in changed(case, default, apart)]
    possible = [values for values in known if impossible(case, values) is None]
    ideal = Report(registers=32, shared_bytes=0, stack_bytes=0, spill_bytes=0, seconds=0.0)
    liked = sorted(possible, key=lambda values: microseconds(case, values, ideal, gpu))
    return [default, *liked[:FINALISTS]]


def _judge(result: Result, finalists: Sequence[Values], gpu: Device, compiled: Ahead) -> None:
    case = result.case
    usual = 0.0
    for values in finalists:
        try:
            report = compiled.report(case, values)
        except KernelError as error:
            result.attempts[values] = Attempt(values, why=str(error).splitlines()[0])
            continue
        if wrong := hopeless(case, values, report):
            result.pruned[values] = wrong
            continue
        us = round(microseconds(case, values, report, gpu), 4)
        usual = us if values == case.default else usual
        result.attempts[values] = Attempt(values, us, us, us, usual, usual)
    if result.default is None:
        result.why = f"the default cannot run there: {result.pruned.get(case.default, 'it does not compile')}"


def is_told_apart(case: Case) -> bool:
    """Whether the model covers this kernel's tunables."""
    return "tile_m" in case.spec.tunables


def microseconds(case: Case, values: Values, report: Report, gpu: Device) -> float:
    """Return the largest of the times that memory, L2, arithmetic and shared memory take, each on its own."""
    assert gpu.spec_bandwidth is not None
    assert gpu.units is not None
    memory = case.spec.bytes(case.dims, case.dtype) / gpu.spec_bandwidth / 1e3
    if not is_told_apart(case):
        return memory
    t, inputs, size = case.tunables(values), case.dims["inputs"], DTYPE_BYTES[case.dtype]
    launch = case.spec.launch(case.dims, t, case.dtype)
    rate = (gpu.fp32_tflops if case.dtype == "fp32" else gpu.tensor_tflops) or 0.0
    per_unit = rate * 1e6 / gpu.units  # operations of a multiprocessor per µs
    tensor = (gpu.tensor_tflops or 0.0) * 1e6 / gpu.units
    shared_rate = tensor / OPERATIONS * SHARED_BYTES  # bytes per µs
    slice_ = -(-inputs // t["splits"])
    arithmetic = 2 * t["tile_m"] * t["tile_n"] * slice_ / per_unit
    shared = _fragment_bytes(case, t) * slice_ / shared_rate
    rounds = -(-launch.grid // gpu.units)  # blocks on the busiest multiprocessor
    blocks = min(max(blocks_held(case, values, report), 1), rounds)
    slow = max(1.0, ENOUGH_THREADS * ARCH_LIMITS[case.arch].threads / (blocks * launch.block))
    through = launch.grid * (t["tile_m"] + t["tile_n"]) * slice_ * size
    l2 = through / (L2_OVER_MEMORY * gpu.spec_bandwidth) / 1e3
    busy = min(launch.grid, gpu.units)
    under_way = busy * blocks * (t["stages"] - 1) * (t["tile_m"] + t["tile_n"]) * t["tile_k"] * size
    drawn = min(1.0, under_way / (LATENCY * gpu.spec_bandwidth * 1e3))  # requested share of the bandwidth
    return max(memory / drawn, l2 * gpu.units / busy, rounds * slow * max(arithmetic, shared))


def _fragment_bytes(case: Case, t: dict[str, int]) -> int:
    """Return the bytes that the warps of a block read from shared memory for one input: in half precision each warp has
    a part of the tile, in float32 its lanes are two rows of sixteen."""
    size = DTYPE_BYTES[case.dtype]
    if case.dtype == "fp32":
        return (t["tile_m"] + 8 * t["tile_n"]) * size
    warps = t["warps_m"] * t["warps_n"]
    return warps * (t["tile_m"] // t["warps_m"] + t["tile_n"] // t["warps_n"]) * size
