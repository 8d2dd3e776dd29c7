"""The parameters of a GPT-2 and the steps of its forward pass: the only definition of their names and shapes.

Names are the checkpoint's. Matrices are held as [out, in], the layout of `torch.nn.Linear`; checkpoints store the
transpose (Conv1D), and `weights.py` is the only place that knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warpline.config import ModelConfig

#: Matrices that checkpoints store transposed.
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def is_quantised(name: str) -> bool:
    """Whether int8 weights store this parameter as codes."""
    return name.endswith((*CONV1D, "wte.weight", "lm_head.weight"))


def block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one block's parameters, named without the leading "h.0."."""
    c, inner = config.n_embd, config.inner
    return {
        "ln_1.weight": (c,),
        "ln_1.bias": (c,),
        "attn.c_attn.weight": (3 * c, c),
        "attn.c_attn.bias": (3 * c,),
        "attn.c_proj.weight": (c, c),
        "attn.c_proj.bias": (c,),
        "ln_2.weight": (c,),
        "ln_2.bias": (c,),
        "mlp.c_fc.weight": (inner, c),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (c, inner),
        "mlp.c_proj.bias": (c,),
    }


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model, in checkpoint order."""
    c = config.n_embd
    block = block_shapes(config)
    result: dict[str, tuple[int, ...]] = {"wte.weight": (config.vocab_size, c), "wpe.weight": (config.n_positions, c)}
    for layer in range(config.n_layer):
        result |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    result |= {"ln_f.weight": (c,), "ln_f.bias": (c,)}
    if not config.tie_word_embeddings:
        result["lm_head.weight"] = (config.vocab_size, c)
    return result


def count(config: ModelConfig) -> int:
    """Return the number of parameters."""
    return sum(math.prod(shape) for shape in shapes(config).values())


@dataclass(frozen=True, slots=True)
class ModelOp:
    """A named step of the forward pass, the part of the model it belongs to, and the parameters it reads."""

    name: str
    scope: str  # "model", "block", "attention" or "mlp"
    parameters: tuple[str, ...] = ()


def _affine(module: str) -> tuple[str, str]:
    return f"{module}.weight", f"{module}.bias"


EMBEDDING = ModelOp("embedding", "model", ("wte.weight",))
POSITION = ModelOp("position", "model", ("wpe.weight",))
ADD = ModelOp("add", "model")
LN_1 = ModelOp("ln_1", "block", _affine("ln_1"))
QKV_PROJECTION = ModelOp("QKV projection", "attention", _affine("attn.c_attn"))
QKV_RESHAPE = ModelOp("QKV reshape", "attention")
KV_CACHE = ModelOp("KV cache", "attention")
SCORES = ModelOp("scores", "attention")
MASK = ModelOp("mask", "attention")
SOFTMAX = ModelOp("softmax", "attention")
VALUES = ModelOp("values", "attention")
FUSED_ATTENTION = ModelOp("fused attention", "attention")
OUTPUT_RESHAPE = ModelOp("output reshape", "attention")
OUTPUT_PROJECTION = ModelOp("output projection", "attention", _affine("attn.c_proj"))
RESIDUAL_1 = ModelOp("residual 1", "block")
LN_2 = ModelOp("ln_2", "block", _affine("ln_2"))
EXPANSION = ModelOp("expansion", "mlp", _affine("mlp.c_fc"))
ACTIVATION = ModelOp("activation", "mlp")
PROJECTION = ModelOp("projection", "mlp", _affine("mlp.c_proj"))
RESIDUAL_2 = ModelOp("residual 2", "block")
LN_F = ModelOp("ln_f", "model", _affine("ln_f"))
LM_HEAD = ModelOp("LM head", "model", ("lm_head.weight",))

#: The steps of one forward pass, in order. The naive form runs scores, mask, softmax and values, the other form one
#: fused attention instead; without a cache there is no KV cache step.
OPS: tuple[ModelOp, ...] = (
    EMBEDDING,
    POSITION,
    ADD,
    LN_1,
    QKV_PROJECTION,
    QKV_RESHAPE,
    KV_CACHE,
    SCORES,
    MASK,
    SOFTMAX,
    VALUES,
    FUSED_ATTENTION,
    OUTPUT_RESHAPE,
    OUTPUT_PROJECTION,
    RESIDUAL_1,
    LN_2,
    EXPANSION,
    ACTIVATION,
    PROJECTION,
    RESIDUAL_2,
    LN_F,
    LM_HEAD,
)
