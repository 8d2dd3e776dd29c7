"""How fast executors decode, as `warpline bench` measured it: what `auto` chooses by. The user's own measurements come
before those of the package."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warpline import store
from warpline.config import ModelConfig
from warpline.hardware import cache_dir
from warpline.model.weights import read_config

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "data" / "speeds"
#: Between which there is a choice.
EXECUTORS = ("graph", "persistent")
#: Repetitions of a measurement that counts.
LEAST = 3
#: A measurement says nothing about batches of more than twice or less than half its size.
REACH = 1.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one executor, with one model, at one place."""

    model: str  # its shape
    dtype: str
    batch: int
    context: int  # mean of the steps
    executor: str
    us: float  # of a step

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What executors are compared at."""
        return self.model, self.dtype, self.batch, self.context


def shape_of(config: ModelConfig) -> str:
    """Models of one shape are as fast as each other."""
    return f"{config.n_layer} × {config.n_embd}, {config.n_head} heads, {config.vocab_size} tokens"


def of_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Speed]]:
    """Those in a benchmark's rows, by GPU; of what was measured twice, the last."""
    found: dict[str, dict[tuple[object, ...], Speed]] = {}
    for row in rows:
        usual = row["kind"] in ("generate", "decode") and row["window"] is None and row["method"] in EXECUTORS
        timed = row["status"] == "ok" and row.get("us_per_token") and row["repetitions"] >= LEAST
        if not (usual and timed and row.get("gpu")):
            continue
        speed = Speed(
            model=shape_of(read_config(row["model"])),
            dtype=row["dtype"],
            batch=row["batch"],
            context=row["prompt"] + row["new"] // 2,
            executor=row["method"],
            us=row["us_per_token"],
        )
        found.setdefault(row["gpu"], {})[*speed.place, speed.executor] = speed
    return {gpu: list(speeds.values()) for gpu, speeds in found.items()}


@functools.lru_cache(maxsize=4096)  # asked several times for every chunk of tokens
def compared(gpu: str, config: ModelConfig, dtype: str, batch: int, context: int) -> Mapping[str, float]:
    """Microseconds of a step by executor, where they were measured nearest to such a batch; empty if nowhere near."""
    for table in _tables(gpu):
        places = [p for p in table if p[:2] == (shape_of(config), dtype) and abs(math.log2(p[2] / batch)) <= REACH]
        if places:
            nearest = min(places, key=lambda p: 4 * abs(math.log2(p[2] / batch)) + abs(math.log2(p[3] / context)))
            return table[nearest]
    return {}


@functools.cache
def _tables(gpu: str) -> list[dict[tuple[str, str, int, int], dict[str, float]]]:
    """By place, where all were measured: the user's, the package's."""
    tables = []
    for path in (user_file(gpu), shipped_file(gpu)):
        table: dict[tuple[str, str, int, int], dict[str, float]] = {}
        for speed in read(path):
            table.setdefault(speed.place, {})[speed.executor] = speed.us
        tables.append({place: found for place, found in table.items() if len(found) == len(EXECUTORS)})
    return tables


def forget() -> None:
    """Read the files again at the next question."""
    _tables.cache_clear()
    compared.cache_clear()


def user_file(gpu: str) -> Path:
    """Where the user's measurements on `gpu` are."""
    return cache_dir() / "speeds" / f"{store.slug(gpu)}.json"


def shipped_file(gpu: str) -> Path:
    """Where the package has its own, if it has any."""
    return SHIPPED / f"{store.slug(gpu)}.json"


def read(path: Path) -> list[Speed]:
    """Those in a file; one that is not there has none, and of a damaged one it is said."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = [Speed(**entry) for entry in raw]
        if not isinstance(raw, list) or not all(
            speed.executor in EXECUTORS and min(speed.batch, speed.context, speed.us) > 0 for speed in found
        ):
            raise ValueError("it is not what a benchmark writes")
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        logger.warning("cannot use %s (%s): delete it, or run 'warpline bench' again", path, error)
        return []


def text(speeds: Iterable[Speed]) -> str:
    """A file's contents: a line for each, in order."""
    lines = [json.dumps(asdict(speed)) for speed in sorted(speeds, key=lambda s: (*s.place, s.executor))]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def remember(rows: Iterable[Mapping[str, Any]]) -> None:
    """Add what a benchmark has measured to what is known, in place of older measurements of the same."""
    for gpu, new in of_rows(rows).items():
        path = user_file(gpu)

        def merged(path: Path = path, new: list[Speed] = new) -> str:
            known = {(*speed.place, speed.executor): speed for speed in (*read(path), *new)}
            return text(known.values())

        store.update(path, merged)
