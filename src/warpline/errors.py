"""The exceptions. Every message says, in one line, what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WarplineError(Exception):
    """An error that the user can fix; the command line prints it as one line and exits with 2."""


class ConfigError(WarplineError, ValueError):
    """A setting or request that cannot be honoured."""


class ModelError(WarplineError):
    """A model that cannot be found or read."""


class DeviceError(WarplineError):
    """A device that is missing, too small or does not support what was requested."""


class KernelError(WarplineError):
    """A kernel that cannot be compiled, loaded or launched."""


def one_of(value: str, choices: Iterable[str], what: str) -> str:
    """Return `value` if it is among `choices`; otherwise raise with all choices and the nearest one."""
    names = list(choices)
    if value in names:
        return value
    raise ConfigError(f"unknown {what} '{value}'{nearest(value, names)}; choose from: {', '.join(names)}")


def nearest(value: str, choices: Iterable[str]) -> str:
    """Return a parenthesis with the closest choice, or an empty string."""
    close = difflib.get_close_matches(value.lower(), list(choices), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
