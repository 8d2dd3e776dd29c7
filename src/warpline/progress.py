"""Progress bars for work that takes long: nothing is drawn during the first second.

A bar is drawn on standard error, if that is a terminal, and removed when the work ends or something is printed. Of
nested work only the innermost has a bar.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_SECONDS = 1.0


class Bar:
    """The progress of some work. Call it with the amount done since the last call; without a total it shows the
    time."""

    def __init__(self, label: str, total: float | None):
        self._label, self._total, self._done = label, total, 0.0
        self._begun, self._hidden = time.monotonic(), 0
        self._drawn: Progress | None = None
        self._lock = threading.RLock()  # a timer draws while the worker thread reports progress
        self._timer: threading.Timer | None = None

    def __call__(self, amount: float) -> None:
        """Add an amount to the work done."""
        self._done += amount
        with self._lock:
            if self._drawn is not None:
                self._drawn.update(self._drawn.task_ids[0], completed=self._done)

    def says(self, label: str) -> None:
        """Change the label."""
        with self._lock:
            self._label = label
            if self._drawn is not None:
                self._drawn.update(self._drawn.task_ids[0], description=label)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the bar inside the block, so that lines can be printed."""
        with self._lock:
            self._hidden += 1
            self._erase()
        try:
            yield
        finally:
            with self._lock:
                self._hidden -= 1
                self._draw_later()

    def _draw_later(self) -> None:
        """Draw the bar, now or when the first second has passed."""
        with self._lock:
            if self._hidden or self._drawn is not None:
                return
            left = self._begun + DELAY_SECONDS - time.monotonic()
            if left <= 0:
                self._draw()
            else:
                self._timer = threading.Timer(left, self._draw_later)
                self._timer.daemon = True
                self._timer.start()

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        share = [] if self._total is None else [TextColumn("{task.percentage:>3.0f} %")]
        self._drawn = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None if self._total is None else 30),
            *share,
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # results go where they are sent, not to where the bar is
        )
        task = self._drawn.add_task(self._label, total=self._total)
        self._drawn.update(task, completed=self._done)
        self._drawn.tasks[task].start_time = self._begun
        self._drawn.start()

    def _erase(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._drawn is not None:
            self._drawn.stop()
            self._drawn = None


_open: list[Bar] = []


@contextmanager
def progress(label: str, total: float | None = None) -> Iterator[Bar]:
    """Show a bar for the work inside the block."""
    bar = Bar(label, total)
    if sys.stderr is None or not sys.stderr.isatty():
        bar._hidden = 1
        yield bar
        return
    outer = _open[-1] if _open else None
    _open.append(bar)
    with nullcontext() if outer is None else outer.hidden():
        bar._draw_later()
        try:
            yield bar
        finally:
            with bar._lock:
                bar._hidden += 1
                bar._erase()
            _open.remove(bar)
