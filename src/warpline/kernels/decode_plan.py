"""Work distribution of the persistent decode kernel: which outputs each block computes, and how long its tape is."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from warpline.config import DTYPE_BYTES
from warpline.hardware import ARCH_LIMITS, arch_number
from warpline.kernels.spec import THREADS_PER_WARP

#: Outputs of one unit of a product; the device code is checked to have as many.
UNIT = 8
#: Outputs of a unit of the LM head's int8 codes (cuda/screen.cuh), and inputs of a tile of them.
CODE_UNIT, CODE_INPUTS = 16, 32
#: Most tiles of an LM head unit that a warp holds in registers while another warp multiplies the tiles before them.
MOST_HALF = 12
#: Bytes of a tile: 16 per lane.
TILE_BYTES = 16 * THREADS_PER_WARP
#: Positions that each warp of a block attends to at once.
WARP_POSITIONS = 8
#: Most sequences at once; fewer for larger models.
MOST_ROWS = 8
#: Pitch of stored logits: rows begin at multiples of so many, so that torch adds up each row in the same order.
LOGITS_STEP = 64
#: The products of a layer, in the order of the tape, and the LM head.
STAGES = ("qkv", "out", "fc", "proj", "head")
#: Cycles into a stage before a block gathers what others post, by kilobytes of a layer's weights per block. Measured on
#: an H200 with gpt2 and gpt2-xl; other models use the line through both, and none goes below gpt2. 150 cycles more or
#: less hardly matter, but no pause costs gpt2 7 % of a token, and gpt2's pauses cost gpt2-xl 2.5 %.
PAUSES = {
    107: {"ROWS": 350, "HEADS": 950, "MIDDLE": 300, "HIDDEN": 800},
    484: {"ROWS": 2500, "HEADS": 3500, "MIDDLE": 1200, "HIDDEN": 1600},
}


@dataclass(frozen=True, slots=True)
class Extents:
    """A model on a GPU, as far as the kernel is compiled for it."""

    dtype: str
    width: int
    inner: int
    heads: int
    layers: int
    vocab: int
    rows: int  # sequences at once
    blocks: int  # one per multiprocessor
    arch: str
    logits: bool = False  # store logits instead of choosing tokens
    filters: bool = False  # support top-k, top-p, min-p, penalties and biases
    observed: bool = False  # keep the exchange words of every layer
    stamped_tokens: int = 0
    warps: int = 0  # 0: the number that divides the work best
    positions: int = 1024  # most positions of a context
    invariant: bool = False  # bits of a row do not depend on other rows: all parts of contexts have one size
    whole: bool = False  # contexts are not split at all
    coded: bool = False  # weights of layers are int8 codes

    @property
    def shared_bytes(self) -> int:
        """All shared memory of a block, minus a little for static variables. The tape's ring gets what BlockShared
        leaves."""
        arch = "sm_75" if arch_number(self.arch) == 75 else self.arch.rstrip("af")
        return ARCH_LIMITS[arch].block_shared_bytes - 64

    @property
    def most_rows(self) -> int:
        """Most sequences: at most one per warp, and their rows must fit beside the keys and values of a part and some
        15 kB more. Where the tape goes through shared memory, it should get about half of what is left."""
        size, depth = DTYPE_BYTES[self.dtype], self.width // self.heads
        each = 4 * self.width + size * (max(self.inner, self.width) * 11 // 10)
        part = best_warps(self) * (16 * (depth * size + 16) + 4 * depth)
        room = (self.shared_bytes - part - 15_000) * (0.55 if arch_number(self.arch) >= 80 else 1)
        most = min(best_warps(self), room // each)
        return next((rows for rows in (MOST_ROWS, 4, 2) if rows <= most), 1)

    def tile_inputs(self, stage: str) -> int:
        """Return the inputs of a tile, which the device code checks. Tiles of the LM head itself are never codes."""
        return 64 // (1 if self.coded and stage != "head" else DTYPE_BYTES[self.dtype])

    @property
    def screened(self) -> bool:
        """Whether only logits that can be the largest are computed, which is so if the others are not needed."""
        return not (self.logits or self.filters)

    @property
    def part_positions(self) -> int:
        """Positions of a part of a context; longer if not invariant and there are too few blocks for so many parts. The
        warps of a block attend to them in two turns: the second half is loaded while the query arrives."""
        return self.positions if self.whole else 2 * WARP_POSITIONS * best_warps(self)

    @property
    def parts(self) -> int:
        """Most parts of a context."""
        return -(-self.positions // self.part_positions)

    @property
    def logits_pitch(self) -> int:
        """Elements from one row of logits to the next."""
        return -(-self.vocab // LOGITS_STEP) * LOGITS_STEP

    @property
    def inputs(self) -> dict[str, int]:
        """Inputs of each stage's product."""
        return {"qkv": self.width, "out": self.width, "fc": self.width, "proj": self.inner, "head": self.width}

    @property
    def outputs(self) -> dict[str, int]:
        """Outputs of each stage's product."""
        return {"qkv": 3 * self.width, "out": self.width, "fc": self.inner, "proj": self.width, "head": self.vocab}

    def units(self, stage: str) -> int:
        """Return the number of units of a stage; the LM head is divided into units of its codes."""
        return -(-self.outputs[stage] // (CODE_UNIT if stage == "head" else UNIT))

    def tiles(self, stage: str) -> int:
        """Return the number of tiles of a unit of the stage."""
        return -(-self.inputs[stage] // self.tile_inputs(stage))

    @property
    def code_tiles(self) -> int:
        """Tiles of a unit of codes; the last one holds the bounds of its outputs."""
        return -(-self.width // CODE_INPUTS) + 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The distribution: for each stage every block's first unit and number of units, and the start of its tape in
    steps."""

    extents: Extents
    warps: int
    first: dict[str, list[int]]
    units: dict[str, list[int]]
    tape: list[int] = field(default_factory=list)

    def steps_of(self, stage: str) -> int:
        """Return the steps of one unit of a layer's stage."""
        return -(-self.extents.tiles(stage) // self.warps)

    def block_steps(self, stage: str, block: int) -> int:
        """Return the steps of a block's part of a layer's stage."""
        return self.steps_of(stage) * self.units[stage][block]

    # The warps of a block take units of the LM head and of its codes whole, in turns. Where few are left for the last
    # turn, several warps share one.

    @property
    def head_parts(self) -> int:
        """Warps that share a unit of the LM head in the last turn: two, if a warp can hold half of it, else one."""
        tiles = self.extents.tiles("head")
        return min(2, self._parts(CODE_UNIT // UNIT)) if tiles % 2 == 0 and tiles <= 2 * MOST_HALF else 1

    @property
    def code_parts(self) -> int:
        """Warps that share a unit of codes in the last turn."""
        return self._parts(1)

    def _parts(self, each: int) -> int:
        units = -(-self.extents.units("head") // self.extents.blocks)  # most units of a block
        left = each * units % self.warps
        return self.warps // left if left else 1

    def head_steps(self, block: int) -> int:
        """Return the steps of a block's part of the LM head."""
        return self._steps(block, CODE_UNIT // UNIT, self.extents.tiles("head"), 0, self.head_parts)

    def code_steps(self, block: int) -> int:
        """Return the steps of the codes of a block's part, with one step per unit for the bounds of its outputs."""
        return self._steps(block, 1, self.extents.code_tiles - 1, 1, self.code_parts)

    def _steps(self, block: int, each: int, tiles: int, known: int, parts: int) -> int:
        units = each * self.units["head"][block]
        if parts == 1:
            return -(-units // self.warps) * (tiles + known)
        turns, left = divmod(units, self.warps)
        return turns * (tiles + known) + (-(-tiles // parts) + known if left else 0)

    def layer_steps(self, block: int) -> int:
        """Return the steps of one layer of a block's tape."""
        return sum(self.block_steps(stage, block) for stage in STAGES[:-1])

    def pauses(self) -> dict[str, int]:
        """Return the pauses for this model in cycles, interpolated from `PAUSES`."""
        blocks = range(self.extents.blocks)
        layer = sum(map(self.layer_steps, blocks)) / len(blocks) * self.warps * TILE_BYTES / 1000
        (small, short), (large, long) = PAUSES.items()
        share = max(0.0, (layer - small) / (large - small))
        return {what: round(cycles + share * (long[what] - cycles)) for what, cycles in short.items()}

    def rows(self) -> list[list[int]]:
        """Return one row per block in the layout of `BlockPlan` in persistent/layout.cuh."""
        return [
            [
                self.tape[b],
                self.extents.layers * self.layer_steps(b),
                self.head_steps(b),
                self.code_steps(b),
                *(self.first[s][b] for s in STAGES),
                *(self.units[s][b] for s in STAGES),
            ]
            for b in range(self.extents.blocks)
        ]

    @property
    def steps(self) -> int:
        """Steps of all blocks' tapes."""
        return self.tape[-1] + sum(self.rows()[-1][1:4])


def best_warps(extents: Extents) -> int:
    """Return the warps of a block: the choice that wastes the fewest tiles, and of equals the one nearest to 12.

    In half precision waste is compared in tenths: 13 warps gain more than memory loses (gpt2-xl on an H200: 851 µs, not
    870). In fp32 they do not (1,725, not 1,674)."""

    def waste(warps: int) -> float:
        padded = [-(-extents.tiles(s) // warps) * warps / extents.tiles(s) for s in ("qkv", "proj")]
        return max(padded)

    choices: tuple[int, ...] = (12, 13, 10, 8, 16)
    digits = 2 if extents.dtype == "fp32" else 1
    if extents.shared_bytes < 110_000:  # each warp needs some shared memory
        choices = (6,) if extents.dtype == "fp32" else (8,)
    return extents.warps or min(choices, key=lambda warps: (round(waste(warps), digits), abs(warps - 12)))


def plan(extents: Extents) -> Plan:
    """Distribute the units so that every block streams about the same number of bytes: the largest units first, and no
    block gets many more of a stage than others. Every block has work in every layer."""
    warps, blocks = best_warps(extents), extents.blocks
    made = Plan(extents, warps, {}, {})
    counts = made.units
    load = [0] * blocks
    for stage in ("proj", "out", "qkv", "fc"):
        cost, units = made.steps_of(stage), extents.units(stage)
        most = -(-units // blocks) + (stage in ("fc", "out"))
        counts[stage] = [0] * blocks
        waiting = [(load[b], b) for b in range(blocks)]
        heapq.heapify(waiting)
        for _ in range(units):
            _, block = heapq.heappop(waiting)
            counts[stage][block] += 1
            load[block] += cost
            if counts[stage][block] < most:
                heapq.heappush(waiting, (load[block], block))
    units = extents.units("head")
    counts["head"] = [(b + 1) * units // blocks - b * units // blocks for b in range(blocks)]
    start = 0
    for stage in STAGES:
        made.first[stage] = [sum(counts[stage][:b]) for b in range(blocks)]
    for b in range(blocks):
        made.tape.append(start)
        start += extents.layers * made.layer_steps(b) + made.head_steps(b) + made.code_steps(b)
    return made
