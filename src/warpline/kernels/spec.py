"""`KernelSpec`: the one description of an op.

Translation unit, argument packing, output buffers, byte counts, tests, bench rows and the torch op all follow from it.
An op is a device function template in `cuda/ops/` and one entry in the catalog; nothing else names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warpline.errors import ConfigError
from warpline.hardware import arch_number, arch_supports
from warpline.kernels.arguments import CUDA_TYPES, Absent, Buffer, Dims, Scalar, Values, extent_of

if TYPE_CHECKING:
    from torch import Tensor

Tunables = Mapping[str, int]

THREADS_PER_WARP = 32


@dataclass(frozen=True, slots=True)
class Launch:
    """The shape of a launch."""

    grid: int
    block: int
    shared_bytes: int = 0
    cluster: int = 1  # blocks that read each other's shared memory; from sm_90 on
    teams: int = 1  # equal parts of a block: threadIdx.y is the team, threadIdx.x counts within it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSpec:
    """One op. Its functions take the dimensions by name, and tunables, dtype and arch where these matter. There is one
    object per op, so identity is equality."""

    name: str
    summary: str
    header: str  # under cuda/
    arguments: tuple[Buffer | Scalar | Absent, ...]
    #: The device function, if it has another name than the op: several ops may use one function with arguments absent.
    function: str | None = None
    #: Element types that follow the storage type in the function's template, such as that of the weights.
    types: tuple[Values, ...] = ()
    #: Compiled-in dimensions: template constants that follow the types.
    constants: tuple[str, ...] = ()
    #: Template constants that follow those, the same for every variant.
    options: tuple[int, ...] = ()
    #: Whether pointers are declared __restrict__, where nothing forbids it.
    restrict: bool = True
    #: Whether the device function itself calls `await_previous_launch`, because it works before that.
    awaits: bool = False
    #: Whether its output is a weight of the next op. That op loads weights as soon as it begins, so it must not begin
    #: before this one has ended.
    makes_weights: bool = False
    #: Values of each tunable; they are the last template constants.
    tunables: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Whether a combination of tunables exists, for dimensions and dtype.
    allows: Callable[[Dims, Tunables, str], bool] = lambda _dims, _tunables, _dtype: True
    #: The tunables to use without a sweep, for dimensions, dtype and arch.
    default: Callable[[Dims, str, str], Tunables]
    #: Tunables with which a row's bits do not depend on the number of rows, where those of the default may.
    invariant: Callable[[Dims, str, str], Tunables] | None = None
    launch: Callable[[Dims, Tunables, str], Launch]
    #: Blocks per multiprocessor that registers must suffice for. With 1 the compiler may use as many as it likes.
    min_blocks: Callable[[Dims, Tunables, str], int] = lambda _dims, _tunables, _dtype: 1
    flops: Callable[[Dims], int]
    #: The op in torch, in the precision of the inputs: takes inputs and numbers; returns the outputs, then the updated
    #: inputs as they are afterwards.
    reference: Callable[..., tuple[Tensor, ...]]
    #: Other implementations on a GPU, where the reference is not torch's best; all counts are full there.
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    #: A library's implementation for many rows, which the engine prefers there: takes inputs and outputs.
    vendor: Callable[..., None] | None = None
    #: For an op whose output is an index: the scores [rows, choices] of which it takes the largest.
    scores: Callable[..., Tensor] | None = None
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    archs: tuple[str, ...] | None = None  # the only archs that it is written for; None: all
    #: Error that the op makes on purpose, relative to its largest result.
    approximation: float = 0.0
    test_dims: tuple[Dims, ...]
    bench_dims: tuple[Dims, ...]

    def _buffers(self, *roles: str) -> list[Buffer]:
        return [a for a in self.arguments if isinstance(a, Buffer) and a.role in roles]

    @property
    def inputs(self) -> list[Buffer]:
        """Buffers that are read, some of which may be changed."""
        return self._buffers("input", "updated", "constant")

    @property
    def outputs(self) -> list[Buffer]:
        """Buffers that are written."""
        return self._buffers("output")

    @property
    def updated(self) -> list[Buffer]:
        """Inputs that are changed."""
        return self._buffers("updated")

    @property
    def results(self) -> list[Buffer]:
        """What the reference returns: outputs, then updated inputs."""
        return self.outputs + self.updated

    @property
    def scratches(self) -> list[Buffer]:
        """Working memory."""
        return self._buffers("scratch")

    @property
    def storage(self) -> int | None:
        """Index of an input that has the storage type, or None."""
        return next((i for i, buffer in enumerate(self.inputs) if buffer.holds.element is None), None)

    @property
    def numbers(self) -> list[Scalar]:
        """Number arguments that are not dimensions."""
        return [a for a in self.arguments if isinstance(a, Scalar) and not a.is_dimension]

    def bytes(self, dims: Dims, dtype: str) -> int:
        """Return the bytes that must move: every input and output once."""
        return sum(buffer.bytes(dims, dtype) for buffer in self.inputs + self.outputs)

    def dims_of(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the dimensions from the shapes of the inputs, in order; raise an error that names a contradiction."""
        dims: dict[str, int] = {}
        for buffer, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(buffer.dims):
                wanted = ", ".join(buffer.dims)
                raise ConfigError(f"{self.name}: {buffer.name} has {len(shape)} dimensions, expected ({wanted})")
            for name, extent in zip(buffer.dims, shape, strict=True):
                known = dims.setdefault(name, extent) if name.isidentifier() else extent_of(name, dims)
                if known != extent and not name.isidentifier():
                    raise ConfigError(f"{self.name}: {buffer.name} must have an extent of {name}, not {extent}")
                if known != extent:
                    raise ConfigError(f"{self.name}: {buffer.name} has {name}={extent}, elsewhere it is {dims[name]}")
        return dims

    def runs_on(self, dtype: str, arch: str) -> bool:
        """Whether the op exists in `dtype` for `arch`."""
        written = self.archs is None or arch in self.archs
        return written and dtype in self.dtypes and arch_supports(arch, dtype)

    def tunables_for(self, dims: Dims, dtype: str, arch: str, *, invariant: bool = False) -> Tunables:
        """Return the default tunables, or those with which a row's bits do not depend on the number of rows."""
        chosen = self.invariant if invariant and self.invariant is not None else self.default
        return chosen(dims, dtype, arch)

    def number_values(self, dims: Dims, given: Mapping[str, float | None] | None = None) -> dict[str, Any]:
        """Return the numbers of a call: given, or named in `dims`, or the default. Unknown names raise an error."""
        values: dict[str, Any] = {s.name: s.default(dims) if callable(s.default) else s.default for s in self.numbers}
        values |= {name: dims[name] for name in values if name in dims}
        for name, value in (given or {}).items():
            if name not in values:
                raise ConfigError(f"{self.name} has no number called '{name}': {', '.join(values) or 'it takes none'}")
            if value is not None:
                values[name] = value
        return values


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled specialisation of a spec: dtype, compiled-in dimensions, tunables. The unit of compilation and
    caching."""

    spec: KernelSpec
    dtype: str
    constants: tuple[tuple[str, int], ...]
    tunables: tuple[tuple[str, int], ...]
    overlapping: bool = False  # may be launched before the preceding launch has ended; from sm_90 on

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        dtype: str,
        dims: Dims,
        arch: str,
        tunables: Tunables | None = None,
        *,
        overlapping: bool = False,
    ) -> Variant:
        """Return the variant for the given dimensions, with the default tunables of `arch` unless they are given."""
        chosen = spec.default(dims, dtype, arch) if tunables is None else tunables
        if set(chosen) != set(spec.tunables):
            raise ConfigError(
                f"{spec.name}: tunables are {', '.join(spec.tunables) or 'none'}, not {', '.join(chosen)}"
            )
        if not spec.allows(dims, chosen, dtype):
            choices = ", ".join(f"{name}={value}" for name, value in chosen.items())
            raise ConfigError(f"{spec.name} cannot be built in {dtype} with {choices}")
        constants = tuple((name, dims[name]) for name in spec.constants)
        overlapping = overlapping and arch_number(arch) >= 90
        return cls(spec, dtype, constants, tuple((name, chosen[name]) for name in spec.tunables), overlapping)

    @property
    def name(self) -> str:
        """The name of the op."""
        return self.spec.name

    @property
    def entry(self) -> str:
        """The kernel's name, also in profilers' traces."""
        return f"warpline_{self.spec.name}"

    @property
    def label(self) -> str:
        """A readable description, for messages."""
        numbers = " ".join(f"{name}={value}" for name, value in (*self.constants, *self.tunables))
        return f"{self.spec.name} {self.dtype} {numbers}".strip() + (" overlapping" if self.overlapping else "")

    def launch(self, dims: Dims) -> Launch:
        """Return the shape of a launch over `dims`."""
        return self.spec.launch(dims, dict(self.tunables), self.dtype)

    @property
    def smallest_launch(self) -> Launch:
        """A launch with all dimensions at 1 that are not compiled in; block size and shared memory do not depend on
        them."""
        ones = {name: 1 for a in self.spec.inputs for name in a.dims if name.isidentifier()}
        return self.launch({**ones, **dict(self.constants)})

    def parameters(self) -> list[Buffer | Scalar]:
        """Return the arguments that the kernel takes at run time."""
        fixed = {*dict(self.constants), *dict(self.tunables), *(a.name for a in self.in_constant_memory)}
        return [a for a in self.spec.arguments if not isinstance(a, Absent) and a.name not in fixed]

    @property
    def in_constant_memory(self) -> list[Buffer]:
        """Inputs in constant memory; their extents are compiled in."""
        return self.spec._buffers("constant")

    def translation_unit(self) -> str:
        """Return the CUDA C++ that instantiates the op: one kernel, nothing else."""
        spec, launch, parameters = self.spec, self.smallest_launch, self.parameters()
        declared = [
            a.declaration(self.dtype, overlapping=self.overlapping or not spec.restrict)
            if isinstance(a, Buffer)
            else f"{'int' if a.is_int else 'float'} {a.name}"
            for a in parameters
        ]
        used = [a for a in spec.arguments if not isinstance(a, Scalar) or a in parameters]
        passed = [a.value if isinstance(a, Absent) else a.name for a in used]
        constants = [value for _, value in self.constants] + [*spec.options] + [value for _, value in self.tunables]
        types = [CUDA_TYPES[self.dtype], *(CUDA_TYPES[holds.element or self.dtype] for holds in spec.types)]
        template = ", ".join([*types, *map(str, constants)])
        # With a minimum of one block the compiler may spend registers on loads in flight.
        bounds = f"{launch.block}, {spec.min_blocks(dict(self.constants), dict(self.tunables), self.dtype)}"
        return "\n".join(
            [
                f"// {self.label}",
                *(("#define WARPLINE_OVERLAPPING",) if self.overlapping else ()),
                f'#include "{spec.header}"',
                '#include "ptx.cuh"',
                *(a.definition(self.dtype, dict(self.constants)) for a in self.in_constant_memory),
                f'extern "C" __global__ void __launch_bounds__({bounds})',
                *((f"__cluster_dims__({launch.cluster}, 1, 1)",) if launch.cluster > 1 else ()),
                f"{self.entry}({', '.join(declared)}) {{",
                "    warpline::allow_next_launch();",
                *(() if spec.awaits else ("    warpline::await_previous_launch();",)),
                f"    warpline::{spec.function or spec.name}<{template}>({', '.join(passed)});",
                "}\n",
            ]
        )
