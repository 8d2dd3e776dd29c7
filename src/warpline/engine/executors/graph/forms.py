"""Parameters in other layouts than a checkpoint's, made when they are first needed and kept with the weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.kernels.catalog.group import in_tiles
from warpline.model.parameters import CONV1D
from warpline.model.weights import Weights

#: Suffix of a module's name for its expanded int8 weights, valid until the next matrix is expanded.
EXPANDED = ".expanded"
#: A library computes logits for a vocabulary padded to a multiple of these: 256 rows take 38 µs with 50,304 tokens and
#: 212 with GPT-2's 50,257 (H200).
VOCAB_STEP = 64


def padding(vocab: int) -> int:
    """Return the number of rows that padding adds to the head."""
    return -vocab % VOCAB_STEP


def padded_head(weights: Weights) -> dict[str, Tensor]:
    """Return the LM head padded with rows; a bias of -inf ensures that these are never chosen. With int8 weights it is
    the memory into which they are expanded."""

    def make() -> dict[str, Tensor]:
        head = weights.tensors[f"{weights.head}.weight"]
        vocab, pad = len(head), padding(len(head))
        found = {"padded_head.bias": F.pad(weights.room(vocab).zero_(), (0, pad), value=-torch.inf)}
        if weights.is_quantised:
            whole = _numbers(weights, vocab + pad, head.shape[1])
            return found | {"padded_head.weight": whole, "padded_head" + EXPANDED: whole[:vocab]}
        return found | {"padded_head.weight": F.pad(head, (0, 0, 0, pad)) if pad else head}

    return weights.form("padded_head", make)


def expanded(weights: Weights) -> dict[str, Tensor]:
    """Return the memory for the layers' matrices expanded from int8, by module. All share the same memory, which holds
    the matrix that was expanded last."""
    names = [name for name in weights.tensors if name.startswith("h.") and name.endswith(CONV1D)]
    return {name.removesuffix(".weight") + EXPANDED: _numbers(weights, *weights.tensors[name].shape) for name in names}


def _numbers(weights: Weights, rows: int, columns: int) -> Tensor:
    """Return a matrix in the shared memory. It is zeroed once, so that padding is not NaN."""

    def make() -> dict[str, Tensor]:
        width, inner, vocab = weights.config.n_embd, weights.config.inner, weights.config.vocab_size
        return {"all": weights.room(width * max(3 * width, inner, vocab + padding(vocab))).zero_()}

    return weights.form("expanded", make)["all"][: rows * columns].view(rows, columns)


def group_products(weights: Weights) -> dict[str, Tensor]:
    """Return the layers' products in tiles.

    Those that follow a LayerNorm include its weight and bias: LayerNorm(x) W^T + b is standardised(x) weight^T + bias.
    The sums of each output's weights allow to standardise after the product: (x - mean) weight^T = x weight^T - mean
    sums."""

    def make() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer in range(weights.config.n_layer):
            for modules in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
                norm, product = (f"h.{layer}.{module}" for module in modules)
                gamma, beta, weight, bias = (
                    weights.tensors[f"{module}.{part}"].float()
                    for module in (norm, product)
                    for part in ("weight", "bias")
                )
                scaled, name = (weight * gamma).to(weights.activations), standard_name(norm, product)
                found |= {f"{name}.tiles": in_tiles(scaled), f"{name}.sums": scaled.float().sum(1)}
                found[f"{name}.bias"] = bias + (weight * beta).sum(1)
            for product in ("attn.c_proj", "mlp.c_proj"):
                name = f"h.{layer}.{product}"
                found[f"{name}.tiles"] = in_tiles(weights.tensors[f"{name}.weight"])
        return found

    return weights.form("group_products", make)


def standard_name(norm: str, product: str) -> str:
    """Return the name of a product with its LayerNorm folded in."""
    return f"{norm}+{product}"
