"""Paths of modules, from four kinds of names: steps of our model, modules of `transformers`, ops of a schedule, and
stamps of the persistent kernel. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from warpline.kernels.catalog.products import CODED
from warpline.model import parameters as p
from warpline.profile.session import ModulePath

ATTENTION, MLP = "attention", "MLP"
#: All blocks together, where layers are merged.
BLOCKS = "transformer blocks"
#: Separates the steps in the name of a kernel that does several; the name of a kernel that does all.
PLUS, WHOLE = " + ", "whole model"

_SCOPES: dict[str, ModulePath] = {"block": (), "attention": (ATTENTION,), "mlp": (MLP,)}
_BY_NAME = {step.name: step for step in p.OPS}

#: Modules of transformers' GPT-2, named without "transformer." and "h.3.".
_HF_MODEL = {"wte": p.EMBEDDING, "wpe": p.POSITION, "ln_f": p.LN_F, "lm_head": p.LM_HEAD}
_HF_BLOCK: dict[str, p.ModelOp | ModulePath] = {
    "ln_1": p.LN_1,
    "attn": (ATTENTION,),
    "attn.c_attn": p.QKV_PROJECTION,
    "attn.c_proj": p.OUTPUT_PROJECTION,
    "ln_2": p.LN_2,
    "mlp": (MLP,),
    "mlp.c_fc": p.EXPANSION,
    "mlp.act": p.ACTIVATION,
    "mlp.c_proj": p.PROJECTION,
}


def path_of(step: p.ModelOp, layer: int | None) -> ModulePath:
    """Return the path of a step of the model; `layer` is None outside the blocks."""
    if layer is None:
        return (step.name,)
    return (f"h.{layer}", *_SCOPES[step.scope], step.name)


def fused(layer: int | None, *steps: p.ModelOp) -> ModulePath:
    """Return the path of a kernel that does several steps: that of its first product, or else of its first step."""
    home = next((step for step in steps if step.scope in ("attention", "mlp")), steps[0])
    return (*path_of(home, layer)[:-1], PLUS.join(step.name for step in steps))


def steps_of(name: str) -> list[p.ModelOp]:
    """Return the priced steps in a leaf's name."""
    if name == WHOLE:
        return list(p.OPS)
    return [_BY_NAME[part] for part in name.split(PLUS) if part in _BY_NAME]


def hf_path(name: str) -> ModulePath | None:
    """Return the path of the transformers module `name`, or None where it has no counterpart here."""
    inner = name.removeprefix("transformer.")
    if found := re.fullmatch(r"h\.(\d+)(?:\.(.+))?", inner):
        layer, rest = int(found[1]), found[2]
        if rest is None:
            return (f"h.{layer}",)
        target = _HF_BLOCK.get(rest)
        if isinstance(target, p.ModelOp):
            return path_of(target, layer)
        return None if target is None else (f"h.{layer}", *target)
    step = _HF_MODEL.get(inner)
    return None if step is None else path_of(step, None)


# --- ops of a schedule ------------------------------------------------------------------------------------------------

#: Ops whose steps follow from their name alone.
_BY_OP: dict[str, tuple[p.ModelOp, ...]] = {
    "newest_embedding": (p.EMBEDDING, p.POSITION, p.ADD),
    "prompt_embedding": (p.EMBEDDING, p.POSITION, p.ADD),
    "append_attention": (p.KV_CACHE, p.FUSED_ATTENTION),
    "append_attention_int8": (p.KV_CACHE, p.FUSED_ATTENTION),
    "prompt_attention": (p.KV_CACHE, p.FUSED_ATTENTION),
    "quantise_kv": (p.KV_CACHE,),
    "prompt_attention_int8": (p.FUSED_ATTENTION,),
    "head_argmax": (p.LN_F, p.LM_HEAD),
    "row_statistics": (p.LN_1,),  # of the first block: products leave those of later blocks
}
_PRODUCTS = {
    "attn.c_attn": p.QKV_PROJECTION,
    "attn.c_proj": p.OUTPUT_PROJECTION,
    "mlp.c_fc": p.EXPANSION,
    "mlp.c_proj": p.PROJECTION,
    "lm_head": p.LM_HEAD,
    "wte": p.LM_HEAD,
    "padded_head": p.LM_HEAD,
}
#: Parts of a parameter's name that follow the module and denote its matrix.
_MATRIX_PARTS = ("weight", "tiles", "expanded")
_NORMS = {"ln_1": p.LN_1, "ln_2": p.LN_2, "ln_f": p.LN_F}


def op_path(op: str, parameters: Sequence[str], layer: int | None) -> ModulePath:
    """Return the path of an op of the catalog, from its name and the parameters that it reads. A LayerNorm fused with a
    residual belongs to the next module, but it is counted with the residual, where its kernel runs."""
    op = op.removesuffix(CODED)
    if op in _BY_OP:
        return fused(0 if op == "row_statistics" else layer, *_BY_OP[op])
    matrices = [module for module, _, part in (n.rpartition(".") for n in parameters) if part in _MATRIX_PARTS]
    modules = [module for name in matrices for module in name.split("+")]  # forms.standard_name
    if found := [m for m in modules if m.startswith("h.")]:
        layer = int(found[0].split(".")[1]) if layer is None else layer
    short = [re.sub(r"^h\.\d+\.", "", m) for m in modules]
    norms = [_NORMS[m] for m in short if m in _NORMS]
    products = [_PRODUCTS[m] for m in short if m in _PRODUCTS]
    if op == "residual_layernorm":
        residual = p.RESIDUAL_1 if norms[0] is p.LN_2 else p.RESIDUAL_2
        if norms[0] is p.LN_1 and found:  # the LayerNorm is the next block's, the residual this one's
            layer = int(found[0].split(".")[1]) - 1
        return fused(layer, residual, *norms)
    steps: list[p.ModelOp] = [*norms, *products]
    if not steps:
        return (op.replace("_", " "),)  # sample, append token: not a step of the model
    if op.endswith("_gelu"):
        steps.append(p.ACTIVATION)
    if op.endswith("_residual"):
        steps.append(p.RESIDUAL_1 if products[0] is p.OUTPUT_PROJECTION else p.RESIDUAL_2)
    return fused(layer if steps[-1].scope != "model" else None, *steps)


# --- clocks of the persistent kernel and of the cpu executor ----------------------------------------------------------

#: The stage that gathers rows is counted with the product that follows, because its weights arrive in the meantime.
_STAGES: dict[str, tuple[p.ModelOp, ...]] = {
    "embedding": (p.EMBEDDING, p.POSITION, p.ADD),
    "ln_1": (p.LN_1, p.QKV_PROJECTION),
    "qkv": (p.LN_1, p.QKV_PROJECTION),
    "cache": (p.KV_CACHE,),
    "attention": (p.KV_CACHE, p.FUSED_ATTENTION),
    "out": (p.OUTPUT_PROJECTION, p.RESIDUAL_1),
    "ln_2": (p.LN_2, p.EXPANSION, p.ACTIVATION),
    "fc": (p.LN_2, p.EXPANSION, p.ACTIVATION),
    "proj": (p.PROJECTION, p.RESIDUAL_2),
    "ln_f": (p.LN_F, p.LM_HEAD),
    "head": (p.LN_F, p.LM_HEAD),
}


def stamp_path(stamp: str, layer: int | None, *, apart: bool = False) -> ModulePath:
    """Return the path of the time before a stamp: "out: heads gathered" in layer 3 is h.3 / attention / output
    projection + residual 1 / heads gathered. `apart`: keys and values are stored in a stage of their own."""
    stage, _, doing = stamp.partition(": ")
    steps = (p.FUSED_ATTENTION,) if apart and stage == "attention" else _STAGES.get(stage)
    return (stage, doing) if steps is None else (*fused(layer, *steps), doing)


def common(a: ModulePath, b: ModulePath) -> ModulePath:
    """Return the innermost module that contains both; () is the step itself."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return a[:same]


def merged(path: ModulePath) -> ModulePath:
    """Return the path with the layer's number replaced by `BLOCKS`."""
    return (BLOCKS, *path[1:]) if path and re.fullmatch(r"h\.\d+", path[0]) else path
