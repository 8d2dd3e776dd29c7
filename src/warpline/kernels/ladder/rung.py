"""A ladder: kernels for the same op, each with one idea more than the one below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from warpline.errors import ConfigError
from warpline.kernels.arguments import Absent, Buffer, Dims, Scalar
from warpline.kernels.spec import KernelSpec, Launch, Tunables, Variant

#: Size of constant memory.
CONSTANT_BYTES = 64 << 10
#: Shown for a rung that cannot run at the dimensions.
NOWHERE = "does not exist at this shape"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rung:
    """One kernel with one new idea. A variant is a side step: the rung above it builds on the rung below it."""

    name: str
    spec: KernelSpec
    why: str  # one sentence: what it changes
    dtype: str = "fp32"
    variant: bool = False
    #: Numbers of the op that are not the defaults, such as a window.
    numbers: Dims = field(default_factory=dict)

    def dims(self, dims: Dims) -> dict[str, int]:
        """Return the given dimensions, with the numbers of this rung that they do not name."""
        return {**self.numbers, **dims}

    def allows(self, dims: Dims, arch: str) -> bool:
        """Whether it exists for these dimensions."""
        return self.spec.allows(dims, self.spec.default(dims, self.dtype, arch), self.dtype)

    def compiled_as(self, dims: Dims, arch: str) -> Variant:
        """Return the variant to compile for these dimensions."""
        return Variant.of(self.spec, self.dtype, self.dims(dims), arch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ladder:
    """Rungs from the bottom to the top; the top one is the catalog's kernel."""

    name: str
    title: str
    rungs: tuple[Rung, ...]
    dims: Dims  # default dimensions
    odd_dims: tuple[Dims, ...]  # dimensions at which every rung is tested
    #: Other implementations on a GPU; they take inputs and numbers.
    yardsticks: Mapping[str, Callable[..., Any]]
    #: Dimensions that always equal another one.
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def axes(self) -> list[str]:
        """The dimensions that can be chosen, in order."""
        return [name for name in self.dims if name not in self.tied]

    @property
    def climb(self) -> list[Rung]:
        """The rungs without the variants."""
        return [rung for rung in self.rungs if not rung.variant]

    def shape_of(self, dims: Dims) -> str:
        """Return the dimensions as a text such as "1024x768"."""
        return "x".join(str(dims[name]) for name in self.axes)

    def sized(self, shape: str) -> dict[str, int]:
        """Return the dimensions from such a text."""
        parts = shape.lower().replace("×", "x").split("x")
        if len(parts) != len(self.axes) or not all(part.isdecimal() and int(part) > 0 for part in parts):
            wanted = "x".join(name.upper() for name in self.axes)
            raise ConfigError(
                f"the shape of {self.name} is {wanted}, such as {self.shape_of(self.dims)}, not '{shape}'"
            )
        chosen = dict(zip(self.axes, map(int, parts), strict=True))
        return {name: chosen[self.tied.get(name, name)] for name in self.dims}


def below(
    top: KernelSpec,
    function: str,
    launch: Callable[[Dims, Tunables, str], Launch],
    *,
    header: str,
    name: str | None = None,
    **changes: Any,
) -> KernelSpec:
    """Return a spec for what `top` computes with another device function, in float32 and without tunables."""
    return replace(
        top,
        **{
            "name": name or function,
            "summary": f"{top.summary}, as a rung of the ladder",
            "header": header,
            "function": function,
            "launch": launch,
            "arguments": present(top),
            "awaits": False,
            "tunables": {},
            "allows": lambda _dims, _tunables, _dtype: True,
            "default": lambda _dims, _dtype, _arch: {},
            "peers": {},
            "vendor": None,
            "dtypes": ("fp32",),
            **changes,
        },
    )


def present(top: KernelSpec) -> tuple[Buffer | Scalar, ...]:
    """Return the arguments of an op without the absent ones, which its lower rungs do not have."""
    return tuple(a for a in top.arguments if not isinstance(a, Absent))


def in_constant_memory(top: KernelSpec, name: str) -> dict[str, Any]:
    """Return the changes to a spec that move one of its inputs into constant memory."""
    buffer = next(replace(b, role="constant") for b in top.inputs if b.name == name)
    return {
        "arguments": tuple(buffer if a.name == name else a for a in present(top)),
        "allows": lambda dims, _tunables, dtype: buffer.bytes(dims, dtype) <= CONSTANT_BYTES,
    }
