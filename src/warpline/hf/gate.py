"""When our operators may run: what they share of a patched model, and the conditions they have in common.

The operators record no gradients and know three storage types. Everything else goes to the original, and a person is
told once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

#: Storage types of the kernels.
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Where they run, on a CPU as their references.
DEVICES = ("cpu", "cuda")
#: Elements of activations from which on a GPU is busier than its host even where that one is slow: below, a torch
#: operator of ours, called through Python, costs more host time than its kernel saves. With an H200 hosts were met that
#: took 6 and 10 ms for the same forward pass of gpt2, in which the GPU reads some 4 times 1,024 positions in float32,
#: or some 16 times as many in half precision. Without a GPU there is nothing to save.
WORTH = {torch.float32: 4 * 1024 * 768, torch.float16: 32 * 1024 * 768, torch.bfloat16: 32 * 1024 * 768}


class Shared:
    """What the replaced parts of one model have in common."""

    def __init__(self, fast_math: bool):
        self.fast_math = fast_math
        self.everywhere = False  # whether our kernels run however little there is to do, so that the probe sees them
        self.told: set[str] = set()

    def tell(self, what: str) -> None:
        """A warning, the first time only."""
        if what not in self.told:
            self.told.add(what)
            warnings.warn(f"warpline: {what}", UserWarning, stacklevel=4)


def obstacle(module: nn.Module, *tensors: Tensor) -> str | None:
    """Why the original has to run on these tensors, if it has to."""
    if module.training:
        return "the model is in train mode, so its original code runs: call model.eval() for the kernels"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *module.parameters())):
        return "gradients are recorded, so the original code runs: use torch.no_grad() for the kernels"
    if tensors[0].device.type not in DEVICES:
        return f"the kernels do not run on {tensors[0].device.type}, so the original code runs"
    if tensors[0].dtype not in DTYPES:
        return f"the kernels know no {tensors[0].dtype}, so the original code runs"
    if torch.is_autocast_enabled(tensors[0].device.type):
        return "autocast is on, so the original code runs: convert the model with model.half() instead"
    return None


def is_worth_it(x: Tensor, shared: Shared | None) -> bool:
    """Whether the GPU, not the host, is the bottleneck; of `shared` there is none without a patch."""
    return not x.is_cuda or (shared is not None and shared.everywhere) or x.numel() >= WORTH.get(x.dtype, 0)


class Forward:
    """Takes the place of one module's `forward`, as an attribute of that instance.

    An object rather than a function, so that deep copies and pickles of the model carry it along with their own module.
    """

    def __init__(self, module: nn.Module, shared: Shared):
        self.module, self.shared = module, shared

    def original(self, *arguments: Any, **keywords: Any) -> Any:
        """What the class does."""
        return type(self.module).forward(self.module, *arguments, **keywords)

    def stopped(self, *tensors: Tensor) -> bool:
        """Whether the original has to run; why is said once."""
        why = obstacle(self.module, *tensors)
        if why is not None and not torch.compiler.is_compiling():
            self.shared.tell(why)
        return why is not None
