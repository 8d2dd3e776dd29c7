"""Elementary functions of the code compiled for a CPU, and how its functions are compiled."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest
import torch
from numba import njit
from numba.core.dispatcher import Dispatcher

from warpline.kernels import cpu
from warpline.kernels.cpu.arithmetic import log
from warpline.kernels.cpu.sampling import FINITE_OR_NOT, gumbel
from warpline.kernels.noise import gumbel as reference

UNIT = float(np.finfo(np.float32).eps)


def _noise(key: int, out: np.ndarray) -> None:
    for i in range(len(out)):
        out[i] = gumbel(key, i)


_COMPILED = njit(_noise, fastmath=FINITE_OR_NOT["fastmath"])


def _log(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = log(x[i])


@pytest.mark.parametrize("key", [0, 5, 77, -3, 2**31 - 1, -(2**31)])
def test_noise_is_that_of_every_executor(key: int) -> None:
    """Also where it is large, which decides what is drawn: there 1 - u is rounded to a few bits of u."""
    out, expected = np.zeros(1_000_000, np.float32), reference(torch.tensor([key], dtype=torch.int32), 1_000_000)[0]
    _COMPILED(key, out)
    assert expected.max() > 12
    error = np.abs(out - expected.numpy()) / np.maximum(1, np.abs(expected.numpy()))
    assert error.max() <= 4 * UNIT


def test_logarithm() -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([np.exp(rng.uniform(-80, 80, 100_000)), 1 + rng.uniform(-1e-3, 1e-3, 100_000), [1.0]])
    x = x.astype(np.float32)
    out = np.zeros_like(x)
    njit(_log)(x, out)
    exact = np.log(x.astype(np.float64))
    assert (np.abs(out - exact) <= 3 * UNIT * np.abs(exact)).all()


@pytest.mark.parametrize("name", [info.name for info in pkgutil.iter_modules(cpu.__path__) if info.name != "build"])
def test_functions_do_not_inherit_how_their_callers_are_compiled(name: str) -> None:
    """A function without a `fastmath` of its own gets that of the caller that is compiled first."""
    module = importlib.import_module(f"{cpu.__name__}.{name}")
    for found in vars(module).values():
        if isinstance(found, Dispatcher):
            assert "fastmath" in found.targetoptions, found
