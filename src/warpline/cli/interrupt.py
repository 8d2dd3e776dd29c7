"""Ctrl-C ends the command at any moment, with exit code 130 and a word instead of a traceback.

Python raises KeyboardInterrupt wherever it is. During an import that is unsafe: half-imported modules stay broken, and
compiled modules lose the exception. Nothing has been computed by then, so the process ends at once.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than all of this
    from types import FrameType
    from typing import Any

INTERRUPTED = 130

_ending = False


def watch() -> None:
    """Install the handlers."""
    signal.signal(signal.SIGINT, _raise)
    usual = sys.unraisablehook

    def unraisable(what: Any) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt):  # from a callback that cannot raise
            end()
        usual(what)

    sys.unraisablehook = unraisable


def leave_at_once() -> None:
    """End the process at the next interrupt: from now on there is nothing to clean up."""
    global _ending
    _ending = True


def _raise(number: int, frame: FrameType | None) -> None:
    global _ending
    if _ending or _imports(frame):
        end()
    _ending = True  # a second interrupt ends the process at once
    raise KeyboardInterrupt


def again() -> None:
    """Accept interrupts again, after a command has handled one and continues."""
    global _ending
    _ending = False


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def end() -> None:
    """Print "stopped" and end the process now."""
    for stream, last in ((sys.stdout, ""), (sys.stderr, "\nstopped\n")):
        try:
            if last and stream.isatty():
                last = f"\r\x1b[2K\x1b[?25h{last}"  # erases a progress bar and shows the cursor again
            stream.write(last)
            stream.flush()
        except (AttributeError, OSError, RuntimeError, ValueError):
            pass  # closed, or interrupted during a write
    os._exit(INTERRUPTED)
