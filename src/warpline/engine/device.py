"""Which device an engine runs on, and in which dtype."""

from __future__ import annotations

import torch

from warpline import hardware
from warpline.errors import DeviceError


def torch_device(device: str) -> torch.device:
    """With its number, so that all engines on a GPU know that they are."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware.describe(device)  # refuses what is not there
    return numbered(torch.device(device))


def numbered(device: torch.device) -> torch.device:
    """The same, with the number of the GPU."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def dtype_of(asked: str, device: hardware.Device, stored: str | None) -> str:
    """What weights become: as asked, or what suits the device, or as they are stored."""
    if asked == "auto":
        return stored or ("fp16" if device.kind == "cuda" else "fp32")
    if not device.supports(asked):
        raise DeviceError(
            f"{device.name} ({device.arch}) cannot compute in {asked}, which needs sm_80: use fp16 or fp32"
        )
    return asked
