"""Tunables that a sweep found best, by GPU, kernel, dtype, shape class and source: the user's own before the shipped.

`launch.Call` asks here before it takes a spec's default. A choice made for other code than there is now is not used.
Files are read once in a process, so that the same op does the same from its beginning to its end.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpline import store
from warpline.hardware import cache_dir
from warpline.kernels.arguments import Dims
from warpline.kernels.catalog import CATALOG
from warpline.kernels.compile import header_digest
from warpline.kernels.spec import KernelSpec, Tunables

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "data" / "choices"
#: Where a choice comes from: timed on that GPU, or the compiler's report and a model of it.
MEASURED, PROJECTED = "measured", "projected"

#: Kernel, dtype, shape class.
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is best for one kernel, dtype and shape class on one GPU."""

    kernel: str
    dtype: str
    shape: str
    digest: str
    tunables: dict[str, int] | None  # None: the default was confirmed
    basis: str = MEASURED

    @property
    def key(self) -> Key:
        """What it is the choice for."""
        return self.kernel, self.dtype, self.shape

    @property
    def is_stale(self) -> bool:
        """Whether it was made for other code than there is now."""
        spec = CATALOG.get(self.kernel)
        return spec is None or header_digest(spec.header) != self.digest


def shape_class(spec: KernelSpec, dims: Dims) -> str:
    """Shapes that share a choice: what is compiled in exactly, other extents up to the same power of two. Extents of
    which only an index speaks (a vocabulary that is looked up, the slots beside those of a batch) say nothing about
    speed."""
    counted = {
        name
        for buffer in spec.inputs + spec.outputs
        if (buffer.holds.element or "fp32").startswith("fp")
        for name in buffer.touched or buffer.dims
    }
    parts = []
    for name in dims:
        if name in spec.constants:
            parts.append(f"{name}={dims[name]}")
        elif name in counted:
            parts.append(f"{name}<={1 << (max(dims[name], 1) - 1).bit_length()}")
    return " ".join(sorted(parts))


def stored(spec: KernelSpec, dtype: str, dims: Dims, gpu: str) -> Tunables | None:
    """The tunables to use on `gpu`, or None for the default: there is no choice, it is stale, or it does not fit."""
    choice = _current(gpu).get((spec.name, dtype, shape_class(spec, dims)))
    if choice is None or choice.tunables is None or not fits(spec, dtype, dims, choice.tunables):
        return None
    return choice.tunables


def fits(spec: KernelSpec, dtype: str, dims: Dims, tunables: Tunables) -> bool:
    """Whether the spec has these tunables, for such dimensions."""
    known = tunables.keys() == spec.tunables.keys()
    known = known and all(tunables[name] in values for name, values in spec.tunables.items())
    return known and spec.allows(dims, tunables, dtype)


@functools.cache
def _current(gpu: str) -> Mapping[Key, Choice]:
    """What is valid now, the user's own before the shipped."""
    layers = (read(shipped_file(gpu), gpu), read(user_file(gpu), gpu))
    return {choice.key: choice for layer in layers for choice in layer if not choice.is_stale}


def forget() -> None:
    """Read the files again at the next question."""
    _current.cache_clear()


@dataclass(frozen=True, slots=True)
class Summary:
    """How many choices there are for a GPU, and where the user's are kept."""

    gpu: str
    swept: int  # by the user, and valid
    shipped: int  # valid, and not replaced by the user's
    projected: int  # of those shipped, how many nobody has timed
    stale: int
    file: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summary(gpu: str) -> Summary:
    """What is stored for `gpu`."""
    mine, theirs = read(user_file(gpu), gpu), read(shipped_file(gpu), gpu)
    own = {choice.key for choice in mine if not choice.is_stale}
    shipped = [choice for choice in theirs if not choice.is_stale and choice.key not in own]
    return Summary(
        gpu=gpu,
        swept=len(own),
        shipped=len(shipped),
        projected=sum(choice.basis == PROJECTED for choice in shipped),
        stale=sum(choice.is_stale for choice in mine + theirs),
        file=str(user_file(gpu)),
    )


# --- files ------------------------------------------------------------------------------------------------------------


def user_file(gpu: str) -> Path:
    """Where the user's choices for `gpu` are."""
    return cache_dir() / "choices" / f"{store.slug(gpu)}.json"


def shipped_file(gpu: str) -> Path:
    """Where the package has its choices for `gpu`, if it has any."""
    return SHIPPED / f"{store.slug(gpu)}.json"


def read(path: Path, gpu: str) -> list[Choice]:
    """The choices in a file; one that is not there has none, and of a damaged one it is said."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = [Choice(**entry) for entry in raw["choices"]]
        if raw["gpu"] != gpu or not all(_is_whole(choice) for choice in found):
            raise ValueError("it is not what a sweep writes")
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("cannot use %s (%s): delete it, or run 'warpline tune' again", path, error)
        return []


def _is_whole(choice: Choice) -> bool:
    tunables = choice.tunables
    sound = tunables is None or (isinstance(tunables, dict) and all(type(v) is int for v in tunables.values()))
    return sound and choice.basis in (MEASURED, PROJECTED)


def text(gpu: str, choices: Iterable[Choice]) -> str:
    """A file's contents: a line for each choice, in order, so that a change of one is a change of one line."""
    lines = [json.dumps(asdict(choice)) for choice in sorted(choices, key=lambda choice: choice.key)]
    return f'{{"gpu": {json.dumps(gpu)}, "choices": [\n' + ",\n".join(lines) + "\n]}\n"


def remember(gpu: str, new: Iterable[Choice]) -> Path:
    """Add choices to the user's, in place of older ones for the same; two sweeps at once lose nothing of each other."""
    path = user_file(gpu)
    return store.update(path, lambda: text(gpu, {one.key: one for one in (*read(path, gpu), *new)}.values()))
