"""Compares measured times with what bytes and FLOPs need: the cost model joined with the tree. A module's time is the
time it computed; the time it waited before that is separate. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from warpline import hardware
from warpline.config import DTYPE_BYTES
from warpline.errors import ConfigError
from warpline.model import cost
from warpline.model import parameters as p
from warpline.profile import tree
from warpline.profile.classify import classify
from warpline.profile.names import ATTENTION, BLOCKS, MLP, PLUS, WHOLE, steps_of
from warpline.profile.session import ModulePath, Phase, Session

#: A module that takes more than this many times its roof's time is bound neither by bytes nor by FLOPs.
LATENCY = 4.0
_SCOPES: dict[str, ModulePath] = {
    "model": (),
    "block": (BLOCKS,),
    "attention": (BLOCKS, ATTENTION),
    "mlp": (BLOCKS, MLP),
}


@dataclass(frozen=True, slots=True)
class Roofs:
    """What a device can do: GB/s of reading, TFLOP/s of products."""

    name: str
    read_gb_s: float
    tflop_s: float
    measured: bool

    def us(self, moved: float, flops: float) -> float:
        """Return the least µs for so many bytes and FLOPs."""
        return max(self.bytes_us(moved), self.flops_us(flops))

    def bytes_us(self, moved: float) -> float:
        """Return the µs for the bytes alone."""
        return moved / self.read_gb_s / 1e3

    def flops_us(self, flops: float) -> float:
        """Return the µs for the FLOPs alone."""
        return flops / self.tflop_s / 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """A module with its price: µs per step, computing and waiting, bytes and FLOPs of all layers."""

    name: str
    us: float
    wait_us: float
    bytes: int
    flops: int
    roof_us: float
    by_bytes: bool  # whether the bytes' roof is the nearer one

    @property
    def gb_s(self) -> float:
        """GB/s: bytes over time."""
        return self.bytes / self.us / 1e3

    @property
    def tflop_s(self) -> float:
        """TFLOP/s: FLOPs over time."""
        return self.flops / self.us / 1e6

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def share(self) -> float:
        """Share of the roof while it computes; above 1 where it read from a cache."""
        return self.roof_us / self.us

    @property
    def bound(self) -> str:
        """The limit: "memory", "compute", or "latency" where it is neither."""
        if self.us > LATENCY * self.roof_us:
            return "latency"
        return "memory" if self.by_bytes else "compute"


def roofs(session: Session) -> Roofs:
    """Return the roofs measured when the session was recorded."""
    return Roofs(session.device, session.read_gb_s, session.product_tflop_s, measured=True)


def other_roofs(gpu: str, dtype: str) -> Roofs:
    """Return the roofs of a GPU from its datasheet."""
    device = hardware.known_gpu(gpu)
    if device is None or device.spec_bandwidth is None:
        names = ", ".join(one.name for one in hardware.KNOWN_GPUS)
        raise ConfigError(f"nothing is known of a GPU called '{gpu}'; choose from: {names}")
    if dtype not in DTYPE_BYTES or not device.supports(dtype):
        raise ConfigError(f"nothing computes in {dtype} on {device.name}: profile in fp16 or fp32")
    rate = device.fp32_tflops if dtype == "fp32" else device.tensor_tflops
    assert rate is not None
    return Roofs(device.name, device.spec_bandwidth, rate, measured=False)


def points(session: Session, phase: Phase, of: Roofs | None = None) -> list[Point]:
    """Return every module that has a price, in the order of the step. A module's own time is priced with those of its
    steps that were not seen separately."""
    limits = of or roofs(session)
    left = {price.step: price for price in cost.costs(session.workload(phase))}
    found: list[Point] = []
    root = tree.build(phase)
    leaves = [node for _, node in root.walk() if node.name != tree.SELF]
    for node in leaves:  # the topmost node that names steps counts: nodes below it are parts of these
        steps = [step for step in steps_of(node.name) if step in left] if node.path else []
        if steps and node.busy_us > 0:
            found.append(_point(node.name, node.busy_us, node.gap_us, [left.pop(step) for step in steps], limits))
    for scope, path in _SCOPES.items():
        own = root.find(*path)
        mine = None if own is None else own.children.get(tree.SELF)
        rest = [price for step, price in left.items() if step.scope == scope and not _absent(step, phase)]
        if mine is not None and rest and mine.busy_us > 0:
            name = f"{path[-1] if path else 'step'} {tree.SELF}"
            found.append(_point(name, mine.busy_us, mine.gap_us, rest, limits))
    return found


def _absent(step: p.ModelOp, phase: Phase) -> bool:
    """Whether the step does not happen in this phase: without a KV cache nothing is stored in one."""
    return step is p.KV_CACHE and phase.work.naive


def whole(session: Session, phase: Phase, of: Roofs | None = None) -> Point:
    """Return the point of the whole step: weights and KV cache once, no activations, which can stay on the chip."""
    limits, work = of or roofs(session), session.workload(phase)
    moved, flops = cost.total_bytes(work), cost.total_flops(work)
    return Point(
        "whole step",
        phase.busy_us,
        phase.gap_us,
        moved,
        flops,
        limits.us(moved, flops),
        limits.bytes_us(moved) >= limits.flops_us(flops),
    )


def _point(name: str, us: float, wait_us: float, prices: list[cost.StepCost], limits: Roofs) -> Point:
    """Price a module. Steps fused into one kernel keep activations on the chip: only the largest counts."""
    moved = sum(price.weight_bytes + price.kv_bytes for price in prices)
    flops = sum(price.flops for price in prices)
    activations = [price.activation_bytes for price in prices]
    moved += max(activations) if PLUS in name or name == WHOLE else sum(activations)
    by_bytes = limits.bytes_us(moved) >= limits.flops_us(flops)
    return Point(name, us, wait_us, moved, flops, limits.us(moved, flops), by_bytes)


def class_bytes(session: Session, phase: Phase) -> dict[str, int]:
    """Return the bytes that each class must move: a module's bytes go to the class in which it spends most time."""
    sums: dict[str, int] = {}
    for point in points(session, phase):
        kinds: dict[str, float] = {}
        for row in phase.kernels:
            if point.name in row.path and (kind := classify(row.name)) != "exchange":
                kinds[kind] = kinds.get(kind, 0.0) + row.us
        if kinds:
            kind = max(kinds, key=kinds.__getitem__)
            sums[kind] = sums.get(kind, 0) + point.bytes
    return sums


@dataclass(frozen=True, slots=True)
class Projection:
    """A module on another GPU: µs at its roof, and where bytes or FLOPs bind it, µs at the same share of the roof."""

    name: str
    here_us: float
    roof_us: float
    expected_us: float | None


def project(session: Session, phase: Phase, gpu: str) -> tuple[Roofs, list[Projection]]:
    """Project the work onto another GPU from its datasheet; nothing is measured."""
    target = other_roofs(gpu, session.dtype)
    rows = []
    here = [*points(session, phase), whole(session, phase)]
    there = [*points(session, phase, target), whole(session, phase, target)]
    for mine, other in zip(here, there, strict=True):
        known = session.kind == "cuda" and mine.bound != "latency"
        expected = other.roof_us / min(1.0, mine.share) if known else None
        rows.append(Projection(mine.name, mine.us, other.roof_us, expected))
    return target, rows
