"""A journal of all measurements of a sweep, written as they happen, so that a sweep that was killed can continue."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from warpline.errors import ConfigError
from warpline.hardware import cache_dir
from warpline.store import slug
from warpline.tune.candidates import Case, Values

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of one candidate: its time and the default's in the same round, or why there is none."""

    values: Values
    us: float | None = None
    p20: float = 0.0
    p80: float = 0.0
    default_us: float = 0.0
    default_p20: float = 0.0
    why: str | None = None

    @property
    def ratio(self) -> float:
        """Its time over the default's; infinite without a time."""
        return self.us / self.default_us if self.us is not None else float("inf")


class Journal:
    """The file of attempts for one GPU."""

    def __init__(self, gpu: str, *, fresh: bool = False):
        self.path = cache_dir() / "tune" / f"{slug(gpu)}.jsonl"
        self._known: dict[tuple[str, ...], dict[Values, Attempt]] = {}
        text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        self._torn = bool(text) and not text.endswith("\n")  # true if a process was killed while it wrote
        if not fresh:
            self._read(text.splitlines())

    def known(self, case: Case) -> dict[Values, Attempt]:
        """Return the attempts at a case with its present code."""
        return dict(self._known.get((*case.key, case.way), {}))

    def write(self, case: Case, attempts: Sequence[Attempt]) -> None:
        """Append attempts in one line: if the process ends here, all or none of them are kept."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                line = json.dumps({"case": (*case.key, case.way), "attempts": [asdict(one) for one in attempts]}) + "\n"
                file.write("\n" + line if self._torn else line)
                self._torn = False
        except OSError as error:
            remedy = "set WARPLINE_CACHE_DIR to a writable folder"
            raise ConfigError(f"cannot write {self.path} ({error.strerror or error}): {remedy}") from error

    def _read(self, lines: Sequence[str]) -> None:
        damaged = 0
        for line in filter(None, lines):
            try:
                raw = json.loads(line)
                attempts = [Attempt(**{**one, "values": tuple(one["values"])}) for one in raw["attempts"]]
                self._known.setdefault(tuple(raw["case"]), {}).update({one.values: one for one in attempts})
            except (ValueError, KeyError, TypeError):
                damaged += 1
        if damaged:
            logger.warning("%s has %d damaged lines: what they said is measured again", self.path, damaged)
