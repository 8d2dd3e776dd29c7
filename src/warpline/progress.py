"""A progress bar for work that turns out to be long: nothing is drawn during the first second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_SECONDS = 1.0


@contextmanager
def progress(label: str, total: float) -> Iterator[Callable[[float], None]]:
    """Yield `advance(amount)`; a bar appears on standard error once a second has passed, if it is a terminal."""
    start = time.monotonic()
    done = 0.0
    bar: Progress | None = None
    visible = sys.stderr is not None and sys.stderr.isatty()

    def advance(amount: float) -> None:
        nonlocal done, bar
        done += amount
        if bar is None and visible and time.monotonic() - start > DELAY_SECONDS:
            bar = _start(label, total)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def _start(label: str, total: float) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(label, total=total)
    bar.start()
    return bar
