"""What a ladder is: kernels for the same op, each with one idea more than the one below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from warpline.errors import ConfigError
from warpline.kernels.arguments import Absent, Buffer, Dims, Scalar
from warpline.kernels.spec import KernelSpec, Launch, Tunables, Variant

#: What constant memory holds.
CONSTANT_BYTES = 64 << 10
#: What is said of a rung that the dimensions leave no room for.
NOWHERE = "does not exist at this shape"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rung:
    """One idea. A variant is an idea aside: the rung above it builds on the one below it."""

    name: str
    spec: KernelSpec
    why: str  # one sentence: what it changes
    dtype: str = "fp32"
    variant: bool = False
    #: Numbers of the op that are not the usual ones, such as a window.
    numbers: Dims = field(default_factory=dict)

    def dims(self, dims: Dims) -> dict[str, int]:
        """Given dimensions, and the numbers of this rung that they do not name."""
        return {**self.numbers, **dims}

    def allows(self, dims: Dims, arch: str) -> bool:
        """Whether it exists for these dimensions."""
        return self.spec.allows(dims, self.spec.default(dims, self.dtype, arch), self.dtype)

    def compiled_as(self, dims: Dims, arch: str) -> Variant:
        """What is compiled for these dimensions."""
        return Variant.of(self.spec, self.dtype, self.dims(dims), arch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ladder:
    """Rungs from the bottom to the top; the top one is the catalog's."""

    name: str
    title: str
    rungs: tuple[Rung, ...]
    dims: Dims  # at which it is climbed unless told otherwise
    odd_dims: tuple[Dims, ...]  # at which every rung must be right first
    #: Others doing the same on a GPU; they take inputs and numbers.
    yardsticks: Mapping[str, Callable[..., Any]]
    #: Dimensions that are always those of another one.
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
        """Dimensions as a text."""
        return "x".join(str(dims[name]) for name in self.axes)

    def sized(self, shape: str) -> dict[str, int]:
        """Dimensions from such a text."""
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
    """A spec for what `top` computes, done by another device function, in float32 and with nothing to tune."""
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
    """The arguments that the op has: its lower rungs do not know those it does without."""
    return tuple(a for a in top.arguments if not isinstance(a, Absent))


def in_constant_memory(top: KernelSpec, name: str) -> dict[str, Any]:
    """The changes to a spec that put one of its inputs there."""
    buffer = next(replace(b, role="constant") for b in top.inputs if b.name == name)
    return {
        "arguments": tuple(buffer if a.name == name else a for a in present(top)),
        "allows": lambda dims, _tunables, dtype: buffer.bytes(dims, dtype) <= CONSTANT_BYTES,
    }
