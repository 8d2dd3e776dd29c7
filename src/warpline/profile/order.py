"""Places the kernels of a graph without an op table by the order of their matrix products: a GPT-2 has four in each
block, or six where attention is done by products, and one at the end. For other counts nothing is placed. Needs no
torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from warpline.model import parameters as p
from warpline.profile.classify import classify
from warpline.profile.names import ATTENTION, path_of
from warpline.profile.session import ModulePath

#: The products of a block in order, by their number.
_PRODUCTS: dict[int, tuple[p.ModelOp, ...]] = {
    4: (p.QKV_PROJECTION, p.OUTPUT_PROJECTION, p.EXPANSION, p.PROJECTION),
    6: (p.QKV_PROJECTION, p.SCORES, p.VALUES, p.OUTPUT_PROJECTION, p.EXPANSION, p.PROJECTION),
}
#: Kernels that belong to the product before them: they sum its parts.
_APPENDIX = re.compile(r"splitk.*reduce|reduce.*splitk", re.IGNORECASE)


def begins_product(name: str) -> bool:
    """Whether a kernel is the first of a product; a second one may sum the parts."""
    return classify(name) == "GEMM" and not _APPENDIX.search(name)


def by_products(names: Sequence[str], layers: int) -> list[ModulePath | None]:
    """Return the module of each kernel of a step; all are None if the products do not fit the model."""
    products = [i for i, name in enumerate(names) if begins_product(name)]
    per, rest = divmod(len(products) - 1, layers)
    if rest or per not in _PRODUCTS:
        return [None] * len(names)
    anchors: list[tuple[p.ModelOp, int | None]] = [(step, layer) for layer in range(layers) for step in _PRODUCTS[per]]
    anchors.append((p.LM_HEAD, None))
    found: list[ModulePath | None] = []
    at = -1  # the last product so far
    for i, name in enumerate(names):
        if at + 1 < len(products) and i == products[at + 1]:
            at += 1
            found.append(path_of(*anchors[at]))
        elif at >= 0 and _APPENDIX.search(name):
            found.append(path_of(*anchors[at]))
        elif at < 0 and name.startswith("Memcpy"):
            found.append(())  # the prompt is copied in
        else:
            before = anchors[at] if at >= 0 else None
            found.append(_between(before, anchors[at + 1] if at + 1 < len(anchors) else None, classify(name)))
    return found


def _between(
    before: tuple[p.ModelOp, int | None] | None, following: tuple[p.ModelOp, int | None] | None, kind: str
) -> ModulePath:
    """Return the module of a kernel between two products, by its class. Adding and normalising counts as LayerNorm."""
    if following is None:
        return ()  # the token is chosen
    step, layer = following
    norms = {p.QKV_PROJECTION: p.LN_1, p.EXPANSION: p.LN_2, p.LM_HEAD: p.LN_F}
    if step in norms:
        if kind == "reduction":
            return path_of(norms[step], layer)
        if before is None:
            return path_of(p.EMBEDDING, None)
        return path_of(p.RESIDUAL_1 if step is p.EXPANSION else p.RESIDUAL_2, before[1])
    if step is p.PROJECTION:
        return path_of(p.ACTIVATION, layer)
    if step is p.VALUES and kind == "reduction":
        return path_of(p.SOFTMAX, layer)
    if kind == "attention":
        return path_of(p.FUSED_ATTENTION, layer)
    if kind == "memory":
        return path_of(p.KV_CACHE, layer)
    return (f"h.{layer}", ATTENTION)
