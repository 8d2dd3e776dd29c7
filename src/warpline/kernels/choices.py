"""Stored best tunables, by GPU, kernel, dtype, shape class and source; the user's take precedence over the shipped
ones.

`launch.Call` asks here before it uses a spec's default. A choice made for other code than the present is not used.
Files are read once per process, so that an op uses the same tunables all the time.
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
#: Source of a choice: timed on that GPU, or projected by a model from the compiler's report.
MEASURED, PROJECTED = "measured", "projected"

#: Kernel, dtype, shape class.
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """The best tunables for one kernel, dtype and shape class on one GPU."""

    kernel: str
    dtype: str
    shape: str
    digest: str
    tunables: dict[str, int] | None  # None: the default is best
    basis: str = MEASURED

    @property
    def key(self) -> Key:
        """The kernel, dtype and shape class that it is for."""
        return self.kernel, self.dtype, self.shape

    @property
    def is_stale(self) -> bool:
        """Whether the code has changed since the choice was made."""
        spec = CATALOG.get(self.kernel)
        return spec is None or header_digest(spec.header) != self.digest


def shape_class(spec: KernelSpec, dims: Dims) -> str:
    """Return a name for the shapes that share a choice: compiled-in extents exactly, others up to the next power of
    two. Extents that only an index uses (a vocabulary that is looked up, the slots beyond a batch) do not affect speed
    and are left out."""
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
    """Return the tunables to use on `gpu`, or None for the default: there is no choice, it is stale, or it does not
    fit."""
    choice = _current(gpu).get((spec.name, dtype, shape_class(spec, dims)))
    if choice is None or choice.tunables is None or not fits(spec, dtype, dims, choice.tunables):
        return None
    return choice.tunables


def fits(spec: KernelSpec, dtype: str, dims: Dims, tunables: Tunables) -> bool:
    """Whether the spec allows these tunables for these dimensions."""
    known = tunables.keys() == spec.tunables.keys()
    known = known and all(tunables[name] in values for name, values in spec.tunables.items())
    return known and spec.allows(dims, tunables, dtype)


@functools.cache
def _current(gpu: str) -> Mapping[Key, Choice]:
    """Return the valid choices; the user's replace the shipped ones."""
    layers = (read(shipped_file(gpu), gpu), read(user_file(gpu), gpu))
    return {choice.key: choice for layer in layers for choice in layer if not choice.is_stale}


def forget() -> None:
    """Drop the cached choices, so that the files are read again."""
    _current.cache_clear()


@dataclass(frozen=True, slots=True)
class Summary:
    """The number of choices for a GPU, and the user's file."""

    gpu: str
    swept: int  # by the user, valid
    shipped: int  # valid, and not replaced by the user's
    projected: int  # of those shipped, how many were not timed
    stale: int
    file: str

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)


def summary(gpu: str) -> Summary:
    """Count the choices stored for `gpu`."""
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
    """Return the path of the user's choices for `gpu`."""
    return cache_dir() / "choices" / f"{store.slug(gpu)}.json"


def shipped_file(gpu: str) -> Path:
    """Return the path of the shipped choices for `gpu`; the file may not exist."""
    return SHIPPED / f"{store.slug(gpu)}.json"


def read(path: Path, gpu: str) -> list[Choice]:
    """Return the choices in a file: none if it does not exist; none and a warning if it is damaged."""
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
    """Return the contents of a choices file: one sorted line per choice, so that diffs are small."""
    lines = [json.dumps(asdict(choice)) for choice in sorted(choices, key=lambda choice: choice.key)]
    return f'{{"gpu": {json.dumps(gpu)}, "choices": [\n' + ",\n".join(lines) + "\n]}\n"


def remember(gpu: str, new: Iterable[Choice]) -> Path:
    """Add choices to the user's file, replacing older ones with the same key. Concurrent sweeps keep each other's
    choices."""
    path = user_file(gpu)
    return store.update(path, lambda: text(gpu, {one.key: one for one in (*read(path, gpu), *new)}.values()))
