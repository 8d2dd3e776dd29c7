"""The candidates of a sweep: cases from the catalog, combinations of tunables, and why some are not worth a launch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from warpline.hardware import ARCH_LIMITS, arch_number, resident_blocks
from warpline.kernels.arguments import Dims
from warpline.kernels.choices import shape_class
from warpline.kernels.compile import Report, header_digest
from warpline.kernels.spec import KernelSpec, Tunables, Variant

#: A grid of up to WHOLE_GRID combinations is tried as a whole; of a larger one, PER_ROUND in a round.
WHOLE_GRID, PER_ROUND = 40, 24
MOST_THREADS = 1024

#: Values of the tunables, in the spec's order.
Values = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One kernel, dtype and shape on one arch, to find the best tunables for. Launches run alone, or overlapping: each
    begins before the one ahead has ended, as in the engine's graphs."""

    spec: KernelSpec
    dtype: str
    dims: Dims
    arch: str
    overlapping: bool = False

    @property
    def shape(self) -> str:
        """The class of shapes that this one stands for."""
        return shape_class(self.spec, self.dims)

    @property
    def digest(self) -> str:
        """Digest of the kernel's code."""
        return header_digest(self.spec.header)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key under which a choice is stored."""
        return self.spec.name, self.dtype, self.shape, self.digest

    @property
    def way(self) -> str:
        """The way it is launched: "overlapping" or "alone"."""
        return "overlapping" if self.overlapping else "alone"

    @property
    def label(self) -> str:
        """The case in one line, as shown to users."""
        return f"{self.spec.name} {self.dtype} {'×'.join(map(str, self.dims.values()))} {self.way}"

    @property
    def default(self) -> Values:
        """The values used without a sweep."""
        return self.values(self.spec.default(self.dims, self.dtype, self.arch))

    def values(self, tunables: Tunables) -> Values:
        """Return the values of tunables, in the spec's order."""
        return tuple(tunables[name] for name in self.spec.tunables)

    def tunables(self, values: Sequence[int]) -> dict[str, int]:
        """Return tunables by name from their values."""
        return dict(zip(self.spec.tunables, values, strict=True))

    def variant(self, values: Values) -> Variant:
        """Return the variant that is compiled."""
        tunables = self.tunables(values)
        return Variant.of(self.spec, self.dtype, self.dims, self.arch, tunables, overlapping=self.overlapping)

    def allows(self, values: Values) -> bool:
        """Whether the kernel can be built with these values."""
        return self.spec.allows(self.dims, self.tunables(values), self.dtype)


def cases(specs: Sequence[KernelSpec], dtypes: Sequence[str], arch: str) -> list[Case]:
    """Return every bench shape, launched in every way the arch has; the first shape of a class stands for all of it."""
    found: dict[tuple[str, ...], Case] = {}
    ways = (False, True) if arch_number(arch) >= 90 else (False,)
    for spec in specs:
        for dtype in dtypes:
            if spec.runs_on(dtype, arch) and spec.tunables:
                for dims in spec.bench_dims:
                    for overlapping in ways:
                        case = Case(spec, dtype, dims, arch, overlapping)
                        found.setdefault((*case.key, case.way), case)
    return list(found.values())


def first_round(case: Case) -> list[Values]:
    """Return the default, then the whole grid if it is small, else candidates near the default."""
    sizes = [len(choices) for choices in case.spec.tunables.values()]
    default = case.default
    if math.prod(sizes) <= 4 * WHOLE_GRID:
        grid = [v for v in itertools.product(*case.spec.tunables.values()) if v != default and case.allows(v)]
        if len(grid) < WHOLE_GRID:
            return [default, *grid]
    return [default, *near(case, default, {default}, PER_ROUND)]


def near(case: Case, centre: Values, tried: Collection[Values], most: int) -> list[Values]:
    """Return untried combinations that differ from `centre` in one tunable, and a sample of those that differ in two:
    tiles and the warps that share them often only make sense changed together. The sample is the same in every run."""
    found = [v for v in changed(case, centre, 1) if v not in tried]
    pairs = [v for v in changed(case, centre, 2) if v not in tried]
    random.Random(f"{case.label} {centre}").shuffle(pairs)
    return (found + pairs)[: max(most, len(found))]


def changed(case: Case, centre: Values, count: int) -> Iterator[Values]:
    """Yield every allowed combination that differs from `centre` in `count` tunables."""
    choices = list(case.spec.tunables.values())
    for places in itertools.combinations(range(len(choices)), count):
        others = [[value for value in choices[i] if value != centre[i]] for i in places]
        for picked in itertools.product(*others):
            values = list(centre)
            for i, value in zip(places, picked, strict=True):
                values[i] = value
            if case.allows(tuple(values)):
                yield tuple(values)


def impossible(case: Case, values: Values) -> str | None:
    """Return why a candidate cannot run on the arch, if that is known without compiling it; else None."""
    launch = case.variant(values).launch(case.dims)
    if launch.shared_bytes > ARCH_LIMITS[case.arch].block_shared_bytes:
        return "more shared memory than a block can have"
    if launch.block > MOST_THREADS:
        return f"more than {MOST_THREADS:,} threads"
    if launch.cluster > 1 and arch_number(case.arch) < 90:
        return "clusters, which this GPU has not"
    return None


def hopeless(case: Case, values: Values, report: Report) -> str | None:
    """Return why the compiler's report makes a launch not worthwhile; else None."""
    if report.spill_bytes:
        return "spilled registers"
    return None if blocks_held(case, values, report) else "no room for one block in a multiprocessor"


def blocks_held(case: Case, values: Values, report: Report) -> int:
    """Return how many blocks a multiprocessor holds at once."""
    launch = case.variant(values).launch(case.dims)
    shared = launch.shared_bytes + (report.shared_bytes or 0)
    return resident_blocks(case.arch, launch.block, report.registers or 0, shared)
