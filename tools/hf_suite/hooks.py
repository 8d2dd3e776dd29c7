"""Patches every GPT-2 that a test makes, and counts what runs afterwards."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import warpline.hf as whf
from warpline.hf import attention, modules
from warpline.hf.gate import DEVICES, DTYPES, Forward
from warpline.hf.generate import Generate

Function = Callable[..., Any]

#: Names of the counts.
PATCHED = "models patched"
OURS = "forward passes of patched models with our code in them"
THEIRS = "forward passes of patched models with none: train mode, gradients, autocast, other dtypes"


class Patching:
    """Patches a model as soon as it is complete: after its constructor, after from_pretrained or, where it had no
    memory or another dtype until then, before a forward pass. A model inside another is left to the outermost one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._depth = 0  # nesting of constructors, loading and forward passes
        self._kernels = 0  # calls of our code so far

    def put(self) -> None:
        """Change the classes, for the lifetime of this process."""
        from transformers import GPT2PreTrainedModel
        from transformers.models.gpt2 import modeling_gpt2

        for kind in vars(modeling_gpt2).values():
            if isinstance(kind, type) and issubclass(kind, GPT2PreTrainedModel) and "__init__" in vars(kind):
                kind.__init__ = self._constructor(kind.__init__)  # type: ignore[misc]
        GPT2PreTrainedModel.from_pretrained = classmethod(self._loader(GPT2PreTrainedModel.from_pretrained.__func__))
        GPT2PreTrainedModel.__call__ = self._call(GPT2PreTrainedModel.__call__)
        for owner, name in ((modules.MLP, "_own"), (modules.MLP, "_library"), (attention, "_ours")):
            setattr(owner, name, self._kernel(getattr(owner, name)))
        Generate.__call__ = self._generate(Generate.__call__)  # type: ignore[method-assign]

    def patch(self, model: Any) -> None:
        """Patch a model if that is possible and not done."""
        base = getattr(model, "transformer", model)
        if isinstance(base.h[0].mlp.__dict__.get("forward"), Forward):
            return
        some = base.wte.weight
        if some.device.type not in DEVICES or some.dtype not in DTYPES:
            self.counts[f"models not patched when they were made: {some.dtype} on {some.device.type}"] += 1
            return
        with self._inside():
            whf.patch(model)
        base.h[0].mlp.forward.shared.everywhere = True  # run our kernels although the models are small
        self.counts[PATCHED] += 1

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Yield whether this is the outermost call."""
        self._depth += 1
        try:
            yield self._depth == 1
        finally:
            self._depth -= 1

    def _constructor(self, original: Function) -> Function:
        @functools.wraps(original)
        def construct(model: Any, *arguments: Any, **keywords: Any) -> None:
            with self._inside() as outermost:
                original(model, *arguments, **keywords)
            if outermost:
                self.patch(model)

        return construct

    def _loader(self, original: Function) -> Function:
        @functools.wraps(original)
        def load(kind: type, *arguments: Any, **keywords: Any) -> Any:
            with self._inside() as outermost:
                result = original(kind, *arguments, **keywords)
            if outermost:
                self.patch(result[0] if isinstance(result, tuple) else result)  # a tuple has loading information
            return result

        return load

    def _call(self, original: Function) -> Function:
        @functools.wraps(original)
        def call(model: Any, *arguments: Any, **keywords: Any) -> Any:
            if self._depth == 0:
                self.patch(model)
            with self._inside() as outermost:
                before = self._kernels
                result = original(model, *arguments, **keywords)
            if outermost:
                self.counts[OURS if self._kernels > before else THEIRS] += 1
            return result

        return call

    def _kernel(self, original: Function) -> Function:
        @functools.wraps(original)
        def count(*arguments: Any, **keywords: Any) -> Any:
            self._kernels += 1
            return original(*arguments, **keywords)

        return count

    def _generate(self, original: Function) -> Function:
        @functools.wraps(original)
        def generate(method: Generate, *arguments: Any, **keywords: Any) -> Any:
            before = dict(method.report.calls)
            result = original(method, *arguments, **keywords)
            for outcome, times in method.report.calls.items():
                if times > before.get(outcome, 0):
                    self.counts[f"generate by the {outcome}"] += 1
            return result

        return generate
