"""When our operators may run: the state they share in a patched model, and their common conditions.

The operators record no gradients and support three dtypes. All other calls use the original code, with one warning per
reason.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

#: Dtypes of the kernels.
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Devices of the operators; on a CPU their references run.
DEVICES = ("cpu", "cuda")
#: Elements of activations from which on a GPU is busier than its host, even a slow host: below, our torch operators,
#: called through Python, cost more host time than their kernels save. Two H200 hosts took 6 and 10 ms for the same
#: forward pass of gpt2, in which the GPU reads some 4 times 1,024 positions in float32, or some 16 times as many in
#: half precision. Without a GPU there is nothing to save.
WORTH = {torch.float32: 4 * 1024 * 768, torch.float16: 32 * 1024 * 768, torch.bfloat16: 32 * 1024 * 768}


class Shared:
    """The state that the replaced parts of one model share."""

    def __init__(self, fast_math: bool):
        self.fast_math = fast_math
        self.everywhere = False  # whether our kernels run at any size, so that the probe tests them
        self.told: set[str] = set()

    def tell(self, what: str) -> None:
        """Warn, only the first time."""
        if what not in self.told:
            self.told.add(what)
            warnings.warn(f"warpline: {what}", UserWarning, stacklevel=4)


def obstacle(module: nn.Module, *tensors: Tensor) -> str | None:
    """Return why the original has to run on these tensors; None if our kernels can."""
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
    """Whether the GPU, not the host, is the bottleneck; `shared` is None without a patch."""
    return not x.is_cuda or (shared is not None and shared.everywhere) or x.numel() >= WORTH.get(x.dtype, 0)


class Forward:
    """Replaces one module's `forward`, as an attribute of that instance.

    It is an object and no function, so that deep copies and pickles of the model take it along with their own module.
    """

    def __init__(self, module: nn.Module, shared: Shared):
        self.module, self.shared = module, shared

    def original(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the class's own forward."""
        return type(self.module).forward(self.module, *arguments, **keywords)

    def stopped(self, *tensors: Tensor) -> bool:
        """Whether the original has to run; warn once with the reason."""
        why = obstacle(self.module, *tensors)
        if why is not None and not torch.compiler.is_compiling():
            self.shared.tell(why)
        return why is not None
