"""Errors of the device, explained in one line."""

from __future__ import annotations

from warpline.errors import DeviceError
from warpline.model.weights import explained_memory


def told(error: BaseException, what: str) -> BaseException:
    """Return the error, or a one-line DeviceError if memory ran out or the GPU failed while doing `what`."""
    try:
        with explained_memory(what):
            raise error
    except DeviceError as known:
        return known
    except RuntimeError:
        if "CUDA error" not in str(error):
            return error
        reason = str(error).splitlines()[0]
        return DeviceError(
            f"the GPU failed while {what} ({reason}), and this process cannot use it any more: start a new one"
        )
    except BaseException as other:  # noqa: BLE001 - it is handed back
        return other
