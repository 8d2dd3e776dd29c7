"""Checks a kernel against its spec: random inputs, a float64 reference, and a bound that follows from the dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warpline.config import ROUNDING
from warpline.errors import KernelError
from warpline.kernels import launch
from warpline.kernels.arguments import STORAGE, Buffer, Dims
from warpline.kernels.launch import TORCH_TYPES
from warpline.kernels.spec import KernelSpec, Tunables
from warpline.kernels.torch_ops import as_floats

#: Bound on the relative error of the float32 operations of one result; their rounding errors add up like a random walk.
FLOAT_ERROR = 64 * 2**-24
#: Arch whose default tunables inputs are made for where there is no GPU.
_ARCH = "sm_90"


def random_inputs(
    spec: KernelSpec,
    dtype: str,
    dims: Dims,
    seed: int,
    device: str = "cuda",
    *,
    full: bool = False,
    tunables: Tunables | None = None,
) -> list[Tensor]:
    """Return fresh inputs: normal values, or as the buffer's `holds` says; with `full`, counts are as large as
    possible. Inputs that depend on tunables are made for these, or for those that a launch on the device would use."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = [_random(buffer, dtype, dims, generator, full) for buffer in spec.inputs]
    if tunables is None and generator.device.type == "cuda":
        tunables = launch.tunables_of(spec, dtype, dims, generator.device.index or 0)
    return made_for(spec, inputs, tunables or spec.default(dims, dtype, _ARCH), dims, seed, full=full)


def made_for(
    spec: KernelSpec, inputs: Sequence[Tensor], tunables: Tunables, dims: Dims, seed: int, *, full: bool = False
) -> list[Tensor]:
    """Return the same inputs for other tunables: those that depend on tunables are made again from the same seed."""
    extents, found = {**dims, **tunables}, list(inputs)
    for i, (buffer, tensor) in enumerate(zip(spec.inputs, inputs, strict=True)):
        if buffer.holds.made is not None:
            made = buffer.holds.made(extents, torch.Generator().manual_seed(seed), full)
            found[i] = made.to(tensor.device, tensor.dtype)
    return found


def _random(buffer: Buffer, dtype: str, dims: Dims, generator: torch.Generator, full: bool) -> Tensor:
    holds = buffer.holds
    kind = TORCH_TYPES[buffer.element(dtype)]
    if holds.made is not None:  # `made_for` makes it
        return torch.empty(0, dtype=kind, device=generator.device)
    shape = buffer.shape(dims)
    if holds.upto is not None:
        highest = dims[holds.upto] + holds.lowest
        lowest = highest - 1 if full and holds.lowest else holds.lowest
    elif not kind.is_floating_point:
        lowest, highest = (0, 2) if kind == torch.bool else (torch.iinfo(kind).min, torch.iinfo(kind).max)
    else:
        numbers = torch.empty(shape, device=generator.device)
        if holds.between is not None:
            return numbers.uniform_(*holds.between, generator=generator)
        return numbers.normal_(generator=generator).to(kind)
    return torch.randint(lowest, highest, shape, generator=generator, device=generator.device, dtype=kind)


class Trial:
    """Random inputs of an op and the expected results, computed once, to check any number of implementations."""

    def __init__(self, spec: KernelSpec, dtype: str, dims: Dims, seed: int, device: str = "cuda"):
        self.spec, self.dtype, self.dims, self.seed = spec, dtype, dims, seed
        self._device, self._numbers = device, spec.number_values(dims)
        self.inputs = random_inputs(spec, dtype, dims, seed, device)
        self._exact = self._exactly(self.inputs)
        self._moved = self._sensitivity()

    def check(self, **options: Any) -> None:
        """Launch the kernel twice, with options of `launch.Call`; raise an error if a result is wrong or the runs
        differ."""
        first, again = self.launch(**options), self.launch(**options)
        wrong = self.fault(first)
        if wrong is None and not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            wrong = "two runs differ"
        if wrong is not None:
            extents = ", ".join(f"{name}={extent}" for name, extent in self.dims.items())
            raise KernelError(f"{self.spec.name} {self.dtype} ({extents}) is wrong: {wrong} (seed {self.seed})")

    def launch(self, **options: Any) -> list[Tensor]:
        """Return the kernel's results. Outputs are poisoned before the launch: NaN, or an index out of range."""
        spec, tunables = self.spec, options.get("tunables")
        if tunables is None:
            device = self.inputs[0].device.index
            tunables = launch.tunables_of(spec, self.dtype, self.dims, device, options.get("arch"))
        fitting = made_for(spec, self.inputs, tunables, self.dims, self.seed)
        given = [t.clone() if b.role == "updated" else t for b, t in zip(spec.inputs, fitting, strict=True)]
        outputs = [
            torch.full(b.shape(self.dims), torch.nan if kind.is_floating_point else -1, dtype=kind, device=self._device)
            for b, kind in ((b, TORCH_TYPES[b.element(self.dtype)]) for b in spec.outputs)
        ]
        launch.run(spec, given, outputs=outputs, numbers=self._numbers, **options)
        return outputs + [t for b, t in zip(spec.inputs, given, strict=True) if b.role == "updated"]

    def fault(self, results: list[Tensor]) -> str | None:
        """Return what is wrong with `results`, which are in the order of `spec.results`, or None."""
        slack = FLOAT_ERROR + self.spec.approximation
        for out, exact, moved, buffer in zip(results, self._exact, self._moved, self.spec.results, strict=True):
            if not _holds_indices(buffer):
                if not out.isfinite().all():
                    return f"{buffer.name} is unwritten or not finite"
                bound = (ROUNDING[self.dtype] + slack) * _largest(exact, buffer) + 4 * moved
                error = (out.double() - exact).abs().max()
                if not error <= bound:
                    return f"{buffer.name} is off by {error:.3g}, where {bound:.3g} is allowed"
            elif not self._is_choice(buffer):
                if not torch.equal(out, exact):
                    return f"{buffer.name} differs"
            else:
                if not ((out >= 0) & (out < exact.shape[-1])).all():
                    return f"{buffer.name} is unwritten or out of range"
                bound = slack * _largest(exact, buffer) + 4 * moved
                if not (exact.gather(-1, out[:, None])[:, 0] >= exact.amax(dim=-1) - bound).all():
                    return f"{buffer.name} is not the largest"
        return None

    def _is_choice(self, buffer: Buffer) -> bool:
        """Whether it holds the index of the largest score; other integers must match exactly."""
        return _holds_indices(buffer) and self.spec.scores is not None

    def _exactly(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the results in float64; for an index, the scores of which it names the largest."""
        exact = as_floats(inputs, torch.float64)
        results = list(self.spec.reference(*exact, **self._numbers))
        for i, buffer in enumerate(self.spec.results):
            if self._is_choice(buffer):
                assert self.spec.scores is not None
                results[i] = self.spec.scores(*exact, **self._numbers)
        return results

    def _sensitivity(self) -> list[Tensor]:
        """Return how far each result moves when every input moves by half a unit in its last place. A fused op may
        round an intermediate, and LayerNorm of two nearly equal values magnifies a rounding by their size over their
        distance. A few draws of signs may miss the worst case, so the bound multiplies this by 4."""
        spec, unit = self.spec, ROUNDING[self.dtype]
        moved = [
            _largest(values.double() * 0, buffer) for values, buffer in zip(self._exact, spec.results, strict=True)
        ]
        for _ in range(3):
            nudged = [
                tensor.double() * (1 + unit * (2 * torch.randint_like(tensor, 2).double() - 1))
                if buffer.holds == STORAGE
                else tensor
                for buffer, tensor in zip(spec.inputs, self.inputs, strict=True)
            ]
            found = zip(self._exactly(nudged), self._exact, spec.results, moved, strict=True)
            moved = [torch.maximum(most, _largest(a.double() - b.double(), buffer)) for a, b, buffer, most in found]
        return moved


def _holds_indices(buffer: Buffer) -> bool:
    return not TORCH_TYPES[buffer.element("fp32")].is_floating_point


def _largest(values: Tensor, buffer: Buffer) -> Tensor:
    """Return the largest finite magnitude; excluded tokens have infinite scores. For scores one value per row, because
    a row of low temperature has scores a thousand times those of its neighbours."""
    finite = values.abs().nan_to_num(0, 0, 0)
    return finite.amax(dim=-1) if _holds_indices(buffer) else finite.max()
