"""The persistent decode kernel: which block does what, its constants and arguments, and its launch.

Device code is in cuda/persistent/. What both languages must know is said here and generated for the other one: the
extents as constants, the arguments as a struct.
"""

from __future__ import annotations

import ctypes
import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warpline.config import DTYPE_BYTES
from warpline.hardware import ARCH_LIMITS, arch_number
from warpline.kernels.arguments import CUDA_TYPES
from warpline.kernels.spec import THREADS_PER_WARP, Launch

if TYPE_CHECKING:
    from torch import Tensor

#: Outputs that one unit of a product has; the device code is checked to have as many.
UNIT = 8
#: Outputs of a unit of the LM head's codes of one byte (cuda/screen.cuh), and inputs of a tile of them.
CODE_UNIT, CODE_INPUTS = 16, 32
#: Bytes of a tile: 16 for each lane.
TILE_BYTES = 16 * THREADS_PER_WARP
#: The products of a layer, in the order of the tape, and the LM head.
STAGES = ("qkv", "out", "fc", "proj", "head")
#: Exchanges that filters may take to choose a token, at most; nearly always there are three.
CHOICE_TURNS = 64
#: Cycles into a stage before a block asks for what others post, where a layer has so many kilobytes for each block:
#: measured on an H200 with gpt2 and gpt2-xl. Other models are on the line through both, none below gpt2. 150 more or
#: less hardly matter, but none at all cost gpt2 7 % of a token, and gpt2's cost gpt2-xl 2.5 %.
PAUSES = {
    107: {"ROWS": 350, "HEADS": 950, "MIDDLE": 300, "HIDDEN": 800},
    484: {"ROWS": 2500, "HEADS": 3500, "MIDDLE": 1200, "HIDDEN": 1600},
}
#: Moments that a launch can stamp, per layer and per token.
LAYER_STAMPS = (
    "ln_1: rows gathered",
    "qkv: multiplied, normalised, posted",
    "attention: gathered, computed, posted",
    "out: heads gathered",
    "out: multiplied, posted",
    "ln_2: rows gathered",
    "fc: multiplied, normalised, posted",
    "proj: hidden gathered",
    "proj: multiplied, posted",
)
TOKEN_STAMPS = ("ln_f: rows gathered, normalised", "head: multiplied", "token: agreed on")

#: The kernel's arguments; pointers unless they say otherwise.
_ARGUMENTS: tuple[tuple[str, str], ...] = (
    ("tape", "const warpline::Bits*"),
    ("plans", "const warpline::BlockPlan*"),
    ("vectors", "const T*"),
    ("lines", "const float*"),
    ("head", "const T*"),
    ("wte", "const T*"),
    ("wpe", "const T*"),
    ("k", "T*"),
    ("v", "T*"),
    ("words", "warpline::Word*"),
    ("lanes", "const long long*"),
    ("tokens", "long long*"),
    ("length", "long long*"),
    ("known", "const long long*"),
    ("limit", "const long long*"),
    ("min_length", "const long long*"),
    ("temperature", "const float*"),
    ("top_k", "const long long*"),
    ("top_p", "const float*"),
    ("min_p", "const float*"),
    ("penalty", "const float*"),
    ("presence", "const float*"),
    ("frequency", "const float*"),
    ("noise", "const int*"),
    ("stops_at_eos", "const bool*"),
    ("biased", "const bool*"),
    ("bias", "float*"),
    ("counts", "int*"),
    ("done", "bool*"),
    ("broken", "bool*"),
    ("logits", "float*"),
    ("fault", "int*"),
    ("stamps", "unsigned long long*"),
    ("patience", "unsigned long long"),
    ("count", "int"),
    ("tag", "unsigned"),
    ("batch", "int"),
    ("cache_rows", "int"),
    ("capacity", "int"),
    ("window", "int"),
    ("eos", "int"),
    ("epsilon", "float"),
    ("scale", "float"),
    ("scale_by_layer", "int"),
)
_CTYPES: dict[str, Any] = {
    "unsigned long long": ctypes.c_ulonglong,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "float": ctypes.c_float,
}


class Arguments(ctypes.Structure):
    """What the kernel takes, as the device sees it."""

    _fields_ = [(name, _CTYPES.get(kind, ctypes.c_void_p)) for name, kind in _ARGUMENTS]


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
    splits: int = 11  # parts of a context at most,
    span: int = 96  # of so many positions at least

    @property
    def shared_bytes(self) -> int:
        """All that a block can have, but for a little static memory; what its desk leaves is the tape's."""
        arch = "sm_75" if arch_number(self.arch) == 75 else self.arch.rstrip("af")
        return ARCH_LIMITS[arch].block_shared_bytes - 64

    @property
    def most_rows(self) -> int:
        """Sequences whose rows there is room for beside the keys and values of a part and some 15 kB more. The tape
        should have about half of what is left, where it goes through shared memory."""
        size, depth = DTYPE_BYTES[self.dtype], self.width // self.heads
        each = 4 * self.width + size * (max(self.inner, self.width) * 11 // 10)
        part = best_warps(self) * (16 * (depth * size + 16) + 4 * depth)
        room = (self.shared_bytes - part - 15_000) * (0.55 if arch_number(self.arch) >= 80 else 1)
        return next((rows for rows in (8, 4, 2) if rows * each <= room), 1)

    @property
    def tile_inputs(self) -> int:
        """Inputs of a tile; the device code is checked to have as many."""
        return 64 // DTYPE_BYTES[self.dtype]

    @property
    def screened(self) -> bool:
        """Whether only logits are computed that can be the largest: where nothing else is asked of the others."""
        return not (self.logits or self.filters)

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
        return -(-self.inputs[stage] // self.tile_inputs)

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

    def head_steps(self, block: int) -> int:
        """Steps of a block's part of the LM head, whose units go whole to a warp."""
        return -(-self.units["head"][block] * (CODE_UNIT // UNIT) // self.warps) * self.extents.tiles("head")

    def code_steps(self, block: int) -> int:
        """Steps of its codes."""
        return -(-self.units["head"][block] // self.warps) * self.extents.code_tiles

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
    load = [0] * blocks
    counts: dict[str, list[int]] = {}
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
        made.units[stage] = counts[stage]
        made.first[stage] = [sum(counts[stage][:b]) for b in range(blocks)]
    for b in range(blocks):
        made.tape.append(start)
        start += extents.layers * made.layer_steps(b) + made.head_steps(b) + made.code_steps(b)
    return made


@dataclass(frozen=True, slots=True)
class DecodeProgram:
    """The kernel for given extents: what `compile` compiles."""

    extents: Extents

    @property
    def name(self) -> str:
        """Of its file in the cache."""
        return "decode"

    @property
    def entry(self) -> str:
        """Of the kernel."""
        return "warpline_decode"

    @property
    def label(self) -> str:
        """For people."""
        e = self.extents
        return f"decode {e.dtype} {e.layers}x{e.width} rows={e.rows} blocks={e.blocks} warps={best_warps(e)}"

    @property
    def threads(self) -> int:
        """Of a block: those that compute, and a warp that copies and watches."""
        return (best_warps(self.extents) + 1) * THREADS_PER_WARP

    def translation_unit(self) -> str:
        """The CUDA C++ that instantiates it."""
        e, made = self.extents, plan(self.extents)
        constants = {
            "ROWS": e.rows,
            "WARPS": made.warps,
            "WIDTH": e.width,
            "INNER": e.inner,
            "HEADS": e.heads,
            "LAYERS": e.layers,
            "VOCAB": e.vocab,
            "BLOCKS": e.blocks,
            "SPLITS": e.splits,
            "SPAN": e.span,
            **{f"{stage.upper()}_UNITS": max(made.units[stage]) for stage in STAGES},
            "SHARED_BYTES": e.shared_bytes,
            "CHOICE_TURNS": CHOICE_TURNS,
            **{f"PAUSE_{what}": cycles for what, cycles in made.pauses().items()},
            "STAMPS": e.stamped_tokens * (len(LAYER_STAMPS) * e.layers + len(TOKEN_STAMPS)),
        }
        return "\n".join(
            [
                f"// {self.label}",
                '#include "persistent/decode.cuh"',
                "struct Model {",
                f"    using T = {CUDA_TYPES[e.dtype]};",
                *(f"    static constexpr int {name} = {value};" for name, value in constants.items()),
                *(
                    f"    static constexpr bool {name.upper()} = {str(getattr(e, name)).lower()};"
                    for name in ("logits", "filters", "observed", "screened")
                ),
                "    struct Arguments {",
                *(f"        {kind} {name};" for name, kind in _ARGUMENTS),
                "    };",
                "};",
                f"static_assert(warpline::TILE_OUTPUTS == {UNIT});",
                f"static_assert(warpline::CODE_OUTPUTS == {CODE_UNIT} && warpline::CODE_INPUTS == {CODE_INPUTS});",
                f"static_assert(warpline::TileSums<Model::T, {e.rows}>::INPUTS == {e.tile_inputs});",
                'extern "C" __device__ int warpline_decode_words = warpline::Decode<Model>::WORDS;',
                f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)',
                f"{self.entry}(const __grid_constant__ Model::Arguments arguments) {{",
                "    warpline::Decode<Model>::launch(arguments);",
                "}\n",
            ]
        )


class DecodeKernel:
    """The program on a device, with words of its own for its blocks to exchange: its launches follow one another."""

    def __init__(self, program: DecodeProgram, device: int):
        import torch

        from warpline.kernels import launch

        self.program, self.device = program, device
        self._module = launch.Module(program, device, program.extents.arch, program.extents.shared_bytes)
        self._shape = Launch(program.extents.blocks, program.threads, program.extents.shared_bytes)
        self._module.require_cooperation(self._shape)
        count = self._module.read_int("warpline_decode_words")
        self.words = torch.zeros(count, dtype=torch.int64, device=device)
        self._tag = 1

    def exchanged(self) -> dict[str, Tensor]:
        """What the blocks of the last launch exchanged, where the program is observed: under the names of the engine's
        schedule, each with a row for a sequence. The words lie as persistent/layout.cuh has them."""
        import torch

        from warpline.kernels.launch import TORCH_TYPES

        e = self.program.extents
        per, kind = 4 // DTYPE_BYTES[e.dtype], TORCH_TYPES[e.dtype]
        depth = e.width // e.heads
        head = depth // per + 2
        shapes = {
            "qkv": (3 * e.width // per, kind),
            "heads": (e.heads * e.splits * head, kind),
            "middle": (e.width, torch.float32),
            "hidden": (e.inner // per, kind),
            "end": (e.width, torch.float32),
        }
        turn = sum(e.rows * words for words, _ in shapes.values())
        payload = self.words.view(torch.int32)[::2]  # the lower halves
        found = {}
        for layer in range(e.layers):
            at = layer * turn
            for name, (words, element) in shapes.items():
                values = payload[at : at + e.rows * words].view(e.rows, words)
                at += e.rows * words
                if name == "heads":
                    values = values.reshape(e.rows, e.heads, e.splits, head)[:, :, 0, : depth // per].flatten(1)
                target = {"heads": f"h.{layer}.attention", "end": f"h.{layer + 1}.in"}.get(name, f"h.{layer}.{name}")
                found[target] = values.contiguous().view(element)
        return found

    def arguments(self, tensors: dict[str, Tensor], numbers: dict[str, float | int]) -> Arguments:
        """What launches on this memory are given, but for what `launch` adds."""
        found = Arguments(words=self.words.data_ptr(), **numbers)
        for name, tensor in tensors.items():
            setattr(found, name, tensor.data_ptr())
        return found

    def launch(self, count: int, arguments: Arguments) -> None:
        """Enqueue up to `count` tokens."""
        extents = self.program.extents
        turns = count * (extents.layers + (CHOICE_TURNS if extents.filters else 1))
        if self._tag + turns >= 2**31:
            self.words.zero_()
            self._tag = 1
        arguments.count, arguments.tag = count, self._tag
        self._tag += turns
        self._module.launch(self._shape, (ctypes.c_void_p * 1)(ctypes.addressof(arguments)), cooperative=True)
