"""The device of an engine, and its dtype."""

from __future__ import annotations

import torch

from warpline import hardware
from warpline.errors import DeviceError


def torch_device(device: str) -> torch.device:
    """Return the torch device with its index, so that engines on the same GPU compare equal; "auto" is CUDA if
    available."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware.describe(device)  # raises an error if the device does not exist
    return numbered(torch.device(device))


def numbered(device: torch.device) -> torch.device:
    """Return the device with the index of the GPU."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def dtype_of(asked: str, device: hardware.Device, stored: str | None) -> str:
    """Return the dtype of the weights: as asked, or for "auto" as stored, or what suits the device."""
    if asked == "auto":
        return stored or ("fp16" if device.kind == "cuda" else "fp32")
    if not device.supports(asked):
        raise DeviceError(
            f"{device.name} ({device.arch}) cannot compute in {asked}, which needs sm_80: use fp16 or fp32"
        )
    return asked
