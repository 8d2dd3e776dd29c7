"""The persistent decode kernel: its constants, arguments and launch; decode_plan.py distributes the work to blocks.

Device code is in cuda/persistent/. What both languages must know is defined here and generated for the device: the
extents as constants, the arguments as a struct.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warpline.config import DTYPE_BYTES
from warpline.kernels.arguments import CUDA_TYPES
from warpline.kernels.decode_plan import CODE_INPUTS, CODE_UNIT, STAGES, UNIT, Extents, best_warps, plan
from warpline.kernels.spec import THREADS_PER_WARP, Launch

if TYPE_CHECKING:
    from torch import Tensor

#: Most exchanges that filters may take to choose a token; usually there are three.
SAMPLER_TURNS = 64
#: Time stamps that a launch can write, per layer and per token.
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

#: Vectors of each layer that the kernel reads, in memory order; those of ln_f follow the last layer's.
VECTORS = ("ln_1.weight", "attn.c_proj.bias", "ln_2.weight", "mlp.c_proj.bias")
FINAL_VECTORS = ("ln_f.weight", "ln_f.bias")

#: The kernel's arguments: names and C++ types.
_ARGUMENTS: tuple[tuple[str, str], ...] = (
    ("tape", "const warpline::Bits*"),
    ("plans", "const warpline::BlockPlan*"),
    ("vectors", "const T*"),
    ("norm_terms", "const float*"),
    ("scales", "const float*"),
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
    ("not_finite", "bool*"),
    ("logits", "float*"),
    ("fault", "int*"),
    ("stamps", "unsigned long long*"),
    ("patience", "unsigned long long"),
    ("layer_stride", "long long"),
    ("count", "int"),
    ("tag", "unsigned"),
    ("batch", "int"),
    ("capacity", "int"),
    ("window", "int"),
    ("eos", "int"),
    ("epsilon", "float"),
    ("scale", "float"),
    ("scale_by_layer", "int"),
)
_CTYPES: dict[str, Any] = {
    "unsigned long long": ctypes.c_ulonglong,
    "long long": ctypes.c_longlong,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "float": ctypes.c_float,
}


class Arguments(ctypes.Structure):
    """The argument struct as the device sees it."""

    _fields_ = [(name, _CTYPES.get(kind, ctypes.c_void_p)) for name, kind in _ARGUMENTS]


@dataclass(frozen=True, slots=True)
class DecodeProgram:
    """The kernel for given extents, as a `compile.Program`."""

    extents: Extents

    @property
    def name(self) -> str:
        """The first part of its file name in the cache."""
        return "decode"

    @property
    def entry(self) -> str:
        """The kernel's name."""
        return "warpline_decode"

    @property
    def label(self) -> str:
        """A readable description, for messages."""
        e = self.extents
        stored = f"{e.dtype} codes" if e.coded else e.dtype
        return f"decode {stored} {e.layers}x{e.width} rows={e.rows} blocks={e.blocks} warps={best_warps(e)}"

    @property
    def threads(self) -> int:
        """Threads of a block: the computing warps, and one warp that feeds the tape and runs the watchdog."""
        return (best_warps(self.extents) + 1) * THREADS_PER_WARP

    def translation_unit(self) -> str:
        """Return the CUDA C++ that instantiates the kernel."""
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
            "PARTS": e.parts,
            "PART": e.part_positions,
            "LOGITS_PITCH": e.logits_pitch,
            "HEAD_PARTS": made.head_parts,
            "CODE_PARTS": made.code_parts,
            **{f"{stage.upper()}_UNITS": max(made.units[stage]) for stage in STAGES},
            "SHARED_BYTES": e.shared_bytes,
            "SAMPLER_TURNS": SAMPLER_TURNS,
            "VECTORS": len(VECTORS),
            **{name.upper().replace(".", "_"): i for names in (VECTORS, FINAL_VECTORS) for i, name in enumerate(names)},
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
                    for name in ("logits", "filters", "observed", "screened", "invariant", "coded")
                ),
                "    struct Arguments {",
                *(f"        {kind} {name};" for name, kind in _ARGUMENTS),
                "    };",
                "};",
                f"static_assert(warpline::TILE_OUTPUTS == {UNIT});",
                f"static_assert(warpline::CODE_OUTPUTS == {CODE_UNIT} && warpline::CODE_INPUTS == {CODE_INPUTS});",
                *(
                    f"static_assert(warpline::TileSums<Model::T, {e.rows}, {codes}>::INPUTS == {e.tile_inputs(stage)});"
                    for codes, stage in (("false", "head"), ("Model::CODED", "qkv"))
                ),
                'extern "C" __device__ int warpline_decode_words = warpline::Decode<Model>::WORDS;',
                f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)',
                f"{self.entry}(const __grid_constant__ Model::Arguments arguments) {{",
                "    warpline::Decode<Model>::launch(arguments);",
                "}\n",
            ]
        )


class DecodeKernel:
    """The program on a device, with its own exchange words. Requires: its launches run one after another."""

    def __init__(self, program: DecodeProgram, device: int):
        import torch

        from warpline.kernels import launch

        self.program, self.device = program, device
        self._module = launch.Module(program, device, program.extents.arch, program.extents.shared_bytes)
        extents = program.extents
        self._shape = Launch(extents.blocks, program.threads, extents.shared_bytes)
        self._module.require_cooperation(self._shape)
        count = self._module.read_int("warpline_decode_words")
        self.words = torch.zeros(count, dtype=torch.int64, device=device)
        self._tag = 1

    def exchanged(self) -> dict[str, Tensor]:
        """Return the values that the blocks of the last launch exchanged, by the names of the engine's schedule, one
        row per sequence. Requires: the program is `observed`. The words are laid out as in persistent/layout.cuh."""
        import torch

        from warpline.kernels.launch import TORCH_TYPES

        e = self.program.extents
        per, kind = 4 // DTYPE_BYTES[e.dtype], TORCH_TYPES[e.dtype]
        depth = e.width // e.heads
        head = depth // per + 2
        shapes = {
            "qkv": (3 * e.width // per, kind),
            "heads": (e.heads * e.parts * head, kind),
            "middle": (e.width, torch.float32),
            "hidden": (e.inner // per, kind),
            "end": (e.width, torch.float32),
        }
        turn = sum(e.rows * words for words, _ in shapes.values())
        payload = self.words.view(torch.int32)[::2]  # the lower halves: payloads
        found = {}
        for layer in range(e.layers):
            at = layer * turn
            for name, (words, element) in shapes.items():
                values = payload[at : at + e.rows * words].view(e.rows, words)
                at += e.rows * words
                if name == "heads":
                    values = values.reshape(e.rows, e.heads, e.parts, head)[:, :, 0, : depth // per].flatten(1)
                target = {"heads": f"h.{layer}.attention", "end": f"h.{layer + 1}.in"}.get(name, f"h.{layer}.{name}")
                found[target] = values.contiguous().view(element)
        return found

    def arguments(self, tensors: dict[str, Tensor], numbers: dict[str, float | int]) -> Arguments:
        """Return the arguments for launches on these tensors, without those that `launch` sets."""
        found = Arguments(words=self.words.data_ptr(), **numbers)
        for name, tensor in tensors.items():
            setattr(found, name, tensor.data_ptr())
        return found

    def launch(self, count: int, arguments: Arguments) -> None:
        """Enqueue up to `count` tokens."""
        extents = self.program.extents
        turns = count * (extents.layers + (SAMPLER_TURNS if extents.filters else 1))
        if self._tag + turns >= 2**31:
            self.words.zero_()
            self._tag = 1
        arguments.count, arguments.tag = count, self._tag
        self._tag += turns
        self._module.launch(self._shape, (ctypes.c_void_p * 1)(ctypes.addressof(arguments)), cooperative=True)
