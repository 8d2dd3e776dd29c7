from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from warpline import hardware
from warpline.errors import DeviceError


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("Tesla T4", 320),
        ("t4", 320),
        ("Tesla V100-SXM2-32GB", 900),
        ("NVIDIA A10", 600),
        ("NVIDIA L4", 300),
        ("NVIDIA GeForce RTX 3090", 936),
        ("rtx 4090", 1008),
        ("NVIDIA GeForce RTX 5090", 1792),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2039),
        ("NVIDIA H200", 4800),
        ("NVIDIA B200", 8000),
    ],
)
def test_known_gpus(name: str, bandwidth: float) -> None:
    device = hardware.known_gpu(name)
    assert device is not None
    assert device.spec_bandwidth == bandwidth


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A10G", "NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "", "T400"],
)
def test_another_card_is_not_taken_for_a_known_one(name: str) -> None:
    assert hardware.known_gpu(name) is None


def test_unknown_device_has_no_limit() -> None:
    assert hardware.Device(name="New", kind="cuda").limit is None
    assert hardware.Device(name="New", kind="cuda", spec_bandwidth=1.0).limit == (1.0, "spec")
    assert hardware.Device(name="New", kind="cuda", spec_bandwidth=1.0, measured_bandwidth=0.8).limit == (
        0.8,
        "measured",
    )


@pytest.mark.parametrize(("arch", "supported"), [("sm_70", False), ("sm_75", False), ("sm_80", True), ("sm_90a", True)])
def test_bf16_needs_sm_80(arch: str, supported: bool) -> None:
    device = hardware.Device(name="x", kind="cuda", arch=arch)
    assert device.supports("bf16") is supported
    assert device.supports("fp16")
    assert hardware.Device(name="x", kind="cpu", arch="x86_64").supports("bf16")


def test_measured_bandwidth_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "cache"))
    cpu = hardware.describe("cpu")
    assert cpu.measured_bandwidth is None
    measured = 12.34
    hardware.remember_bandwidth(cpu, measured)
    again = hardware.describe("cpu").measured_bandwidth
    assert again == pytest.approx(measured, abs=0.01)
    assert hardware.remember_bandwidth(cpu, measured / 2).measured_bandwidth == again  # on a busy machine
    assert hardware.remember_bandwidth(cpu, measured * 2).measured_bandwidth == pytest.approx(2 * measured, abs=0.01)


@pytest.mark.parametrize("broken", ["{broken", "[1]", '{"x": null}', '{"x": "fast"}'])
def test_broken_cache_is_said_and_healed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path))
    (tmp_path / "bandwidth.json").write_text(broken)
    cpu = hardware.describe("cpu")
    assert cpu.measured_bandwidth is None
    assert "cannot read" in caplog.text
    hardware.remember_bandwidth(cpu, 12.5)
    assert hardware.describe("cpu").measured_bandwidth == 12.5


def test_unwritable_cache_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WARPLINE_CACHE_DIR", str(tmp_path / "file" / "below"))
    hardware.remember_bandwidth(hardware.Device(name="x", kind="cpu"), 1.0)
    assert "set WARPLINE_CACHE_DIR to a writable folder" in caplog.text


def test_missing_gpu_is_explained() -> None:
    if torch.cuda.is_available():
        with pytest.raises(DeviceError, match="there is no device 'cuda:99'"):
            hardware.describe("cuda:99")
    else:
        with pytest.raises(DeviceError, match="--device cpu"):
            hardware.describe("cuda")


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_waking_a_gpu_holds_nobody_up(device: str) -> None:
    hardware.wake_gpu(device)
    for thread in threading.enumerate():
        if thread.name == "wake-gpu":
            thread.join(60)
            assert not thread.is_alive()


def test_a_cpu_needs_no_waking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpline.hardware.threading.Thread", None)
    hardware.wake_gpu("cpu")
