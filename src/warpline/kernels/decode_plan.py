"""Who does what in the persistent decode kernel: which outputs are whose, and how long each block's tape is."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from warpline.config import DTYPE_BYTES
from warpline.hardware import ARCH_LIMITS, arch_number
from warpline.kernels.spec import THREADS_PER_WARP

#: Outputs that one unit of a product has; the device code is checked to have as many.
UNIT = 8
#: Outputs of a unit of the LM head's codes of one byte (cuda/screen.cuh), and inputs of a tile of them.
CODE_UNIT, CODE_INPUTS = 16, 32
#: Tiles of a unit of the LM head that a warp holds in registers while another multiplies those before them.
MOST_HALF = 12
#: Bytes of a tile: 16 for each lane.
TILE_BYTES = 16 * THREADS_PER_WARP
#: Positions that each warp of a block attends to at once.
WARP_POSITIONS = 8
#: Sequences at once, at most; of larger models fewer.
MOST_ROWS = 8
#: Logits that are left behind: rows begin at multiples of so many, so that torch adds each up in the same order.
LOGITS_STEP = 64
#: The products of a layer, in the order of the tape, and the LM head.
STAGES = ("qkv", "out", "fc", "proj", "head")
#: Cycles into a stage before a block asks for what others post, where a layer has so many kilobytes for each block:
#: measured on an H200 with gpt2 and gpt2-xl. Other models are on the line through both, none below gpt2. 150 more or
#: less hardly matter, but none at all cost gpt2 7 % of a token, and gpt2's cost gpt2-xl 2.5 %.
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
    blocks: int  # one to a multiprocessor
    arch: str
    logits: bool = False  # leave logits behind instead of choosing tokens
    filters: bool = False  # know top-k, top-p, min-p, penalties and biases
    observed: bool = False  # keep what blocks exchange, layer by layer
    stamped_tokens: int = 0
    warps: int = 0  # 0: as many as divide the work best
    positions: int = 1024  # of a context, at most
    invariant: bool = False  # rows have the same bits in any company: all parts of contexts have one size
    whole: bool = False  # contexts are not cut at all
    coded: bool = False  # weights of layers are codes of one byte

    @property
    def shared_bytes(self) -> int:
        """All that a block can have, but for a little static memory; what its desk leaves is the tape's."""
        arch = "sm_75" if arch_number(self.arch) == 75 else self.arch.rstrip("af")
        return ARCH_LIMITS[arch].block_shared_bytes - 64

    @property
    def most_rows(self) -> int:
        """Sequences, no more than warps, whose rows there is room for beside the keys and values of a part and some
        15 kB more. The tape should have about half of what is left, where it goes through shared memory."""
        size, depth = DTYPE_BYTES[self.dtype], self.width // self.heads
        each = 4 * self.width + size * (max(self.inner, self.width) * 11 // 10)
        part = best_warps(self) * (16 * (depth * size + 16) + 4 * depth)
        room = (self.shared_bytes - part - 15_000) * (0.55 if arch_number(self.arch) >= 80 else 1)
        most = min(best_warps(self), room // each)
        return next((rows for rows in (MOST_ROWS, 4, 2) if rows <= most), 1)

    def tile_inputs(self, stage: str) -> int:
        """Inputs of a tile; the device code is checked to have as many. The LM head is never codes alone."""
        return 64 // (1 if self.coded and stage != "head" else DTYPE_BYTES[self.dtype])

    @property
    def screened(self) -> bool:
        """Whether only logits are computed that can be the largest: where nothing else is asked of the others."""
        return not (self.logits or self.filters)

    @property
    def part_positions(self) -> int:
        """Positions of a part of a context; more, if not invariant, where there are too few blocks for so many parts.
        The warps of a block attend to them in two turns: the second half arrives while the query is on its way."""
        return self.positions if self.whole else 2 * WARP_POSITIONS * best_warps(self)

    @property
    def parts(self) -> int:
        """Parts of a context, at most."""
        return -(-self.positions // self.part_positions)

    @property
    def logits_pitch(self) -> int:
        """From one row of logits to the next."""
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
        """Units that a stage has; blocks share the LM head in units of its codes."""
        return -(-self.outputs[stage] // (CODE_UNIT if stage == "head" else UNIT))

    def tiles(self, stage: str) -> int:
        """Tiles that a unit of the stage has."""
        return -(-self.inputs[stage] // self.tile_inputs(stage))

    @property
    def code_tiles(self) -> int:
        """Tiles of a unit of codes; the last has what is known of its outputs."""
        return -(-self.width // CODE_INPUTS) + 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what: for each stage a block's first unit and how many, and where its tape begins, in steps."""

    extents: Extents
    warps: int
    first: dict[str, list[int]]
    units: dict[str, list[int]]
    tape: list[int] = field(default_factory=list)

    def steps_of(self, stage: str) -> int:
        """Steps of a unit of a layer."""
        return -(-self.extents.tiles(stage) // self.warps)

    def block_steps(self, stage: str, block: int) -> int:
        """Steps of a block's part of a layer's stage."""
        return self.steps_of(stage) * self.units[stage][block]

    # Units of the LM head and of its codes go whole to the warps of a block, in turns. Where few are left for the last
    # turn, several warps share one.

    @property
    def head_parts(self) -> int:
        """Warps that share a unit of the LM head in the last turn: two, if a half is no more than one can hold."""
        tiles = self.extents.tiles("head")
        return min(2, self._parts(CODE_UNIT // UNIT)) if tiles % 2 == 0 and tiles <= 2 * MOST_HALF else 1

    @property
    def code_parts(self) -> int:
        """Warps that share a unit of codes in the last turn."""
        return self._parts(1)

    def _parts(self, each: int) -> int:
        units = -(-self.extents.units("head") // self.extents.blocks)  # that a block has at most
        left = each * units % self.warps
        return self.warps // left if left else 1

    def head_steps(self, block: int) -> int:
        """Steps of a block's part of the LM head."""
        return self._steps(block, CODE_UNIT // UNIT, self.extents.tiles("head"), 0, self.head_parts)

    def code_steps(self, block: int) -> int:
        """Steps of its codes, with one for what is known of the outputs."""
        return self._steps(block, 1, self.extents.code_tiles - 1, 1, self.code_parts)

    def _steps(self, block: int, each: int, tiles: int, known: int, parts: int) -> int:
        units = each * self.units["head"][block]
        if parts == 1:
            return -(-units // self.warps) * (tiles + known)
        turns, left = divmod(units, self.warps)
        return turns * (tiles + known) + (-(-tiles // parts) + known if left else 0)

    def layer_steps(self, block: int) -> int:
        """Steps of one layer of a block's tape."""
        return sum(self.block_steps(stage, block) for stage in STAGES[:-1])

    def pauses(self) -> dict[str, int]:
        """How long blocks wait before they ask, from `PAUSES`."""
        blocks = range(self.extents.blocks)
        layer = sum(map(self.layer_steps, blocks)) / len(blocks) * self.warps * TILE_BYTES / 1000
        (small, short), (large, long) = PAUSES.items()
        share = max(0.0, (layer - small) / (large - small))
        return {what: round(cycles + share * (long[what] - cycles)) for what, cycles in short.items()}

    def rows(self) -> list[list[int]]:
        """As `BlockPlan` of persistent/layout.cuh has it."""
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
        """Of all blocks' tapes."""
        return self.tape[-1] + sum(self.rows()[-1][1:4])


def best_warps(extents: Extents) -> int:
    """Warps of a block: as few tiles wasted as possible, and of the best the number nearest to 12. In half precision a
    twentieth does not count: 13 warps gain more than memory loses (gpt2-xl on an H200: 851 µs, not 870), in fp32 they
    do not (1,725, not 1,674)."""

    def waste(warps: int) -> float:
        padded = [-(-extents.tiles(s) // warps) * warps / extents.tiles(s) for s in ("qkv", "proj")]
        return max(padded)

    choices: tuple[int, ...] = (12, 13, 10, 8, 16)
    digits = 2 if extents.dtype == "fp32" else 1
    if extents.shared_bytes < 110_000:  # each warp takes some of it
        choices = (6,) if extents.dtype == "fp32" else (8,)
    return extents.warps or min(choices, key=lambda warps: (round(waste(warps), digits), abs(warps - 12)))


def plan(extents: Extents) -> Plan:
    """Give every block about the same number of bytes to stream, in units, the coarse ones first, and to no block many
    more of a stage than to others. Every block has something to do in every layer."""
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
