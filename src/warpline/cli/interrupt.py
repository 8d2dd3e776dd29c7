"""Ctrl-C ends the command at any moment, with 130 and a word instead of a traceback.

Python raises KeyboardInterrupt wherever it is. While modules are imported that is too deep: what is half imported
stays behind broken, and compiled modules lose the exception. Nothing has been made by then, so the process just ends.
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
    """From now on."""
    signal.signal(signal.SIGINT, _raise)
    usual = sys.unraisablehook

    def unraisable(what: Any) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt):  # from a callback that can raise nothing
            end()
        usual(what)

    sys.unraisablehook = unraisable


def leave_at_once() -> None:
    """From now on there is nothing that could be tidied up."""
    global _ending
    _ending = True


def _raise(number: int, frame: FrameType | None) -> None:
    global _ending
    if _ending or _imports(frame):
        end()
    _ending = True  # whoever asks twice does not want to wait
    raise KeyboardInterrupt


def again() -> None:
    """The interrupt has been answered, by a command that goes on."""
    global _ending
    _ending = False


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def end() -> None:
    """Now."""
    for stream, last in ((sys.stdout, ""), (sys.stderr, "\nstopped\n")):
        try:
            if last and stream.isatty():
                last = f"\r\x1b[2K\x1b[?25h{last}"  # a bar may stand there, and the cursor be hidden
            stream.write(last)
            stream.flush()
        except (AttributeError, OSError, RuntimeError, ValueError):
            pass  # closed, or in the middle of a write
    os._exit(INTERRUPTED)
