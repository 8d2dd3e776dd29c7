"""One decode step as a table: which op of the catalog reads and writes which buffer.

Whoever runs the table decides how: kernel by kernel, as a CUDA graph, or, where there is no GPU, by each op's reference
in torch, so that the table itself is tested on any machine. Buffers go by name; parameters have their checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpline.engine.bind import Bound, runs_at_once
from warpline.engine.forms import group_products, padded_head, padding, standard_name
from warpline.engine.state import State
from warpline.kernels.catalog import find
from warpline.kernels.catalog.products import MOST_MATVEC_ROWS
from warpline.kernels.spec import KernelSpec
from warpline.model.weights import Weights

#: What `sample` and `append_token` read of a state, in their order; together, what any step needs of it.
SAMPLED_BY = (
    "tokens", "length", "noise", "temperature", "top_k", "top_p", "min_p", "penalty", "min_length", "stops_at_eos",
)  # fmt: skip
ENDED_BY = ("known", "limit", "stops_at_eos", "tokens", "length", "done", "broken")


@dataclass(frozen=True, slots=True)
class Step:
    """One op, and the names of its inputs and outputs."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    layer: int | None = None

    @property
    def spec(self) -> KernelSpec:
        """The op's entry in the catalog."""
        return find(self.op)


class _Blocks:
    """The ops of blocks over `rows` rows. With x go its LayerNorm, x.normal, or x.statistics, where the product behind
    it needs them; the one before it leaves them."""

    def __init__(self, weights: Weights, rows: int):
        self._few, self._whole = rows <= MOST_MATVEC_ROWS, is_whole(weights, rows)
        self._epsilon = {"epsilon": weights.config.layer_norm_epsilon}

    def begin(self, x: str, norm: str, layer: int) -> list[Step]:
        """What a product leaves with the rows that it writes, for rows that come from elsewhere."""
        if self._few:
            return []
        if self._whole:
            return [Step("row_statistics", (x,), (f"{x}.statistics",), layer=layer)]
        return [Step("layernorm", (x, *_affine(norm)), (f"{x}.normal",), self._epsilon, layer)]

    def normal(self, x: str, norm: str, name: str, target: str, layer: int, activation: str = "") -> Step:
        """LayerNorm and a product of it: one op, or, for many rows, the LayerNorm is there already."""
        if self._few:
            op, inputs = f"layernorm_matvec_bias{activation}", (x, *_affine(norm), *_affine(name))
            return Step(op, inputs, (target,), self._epsilon, layer)
        if self._whole:
            both = standard_name(norm, name)
            read = (x, f"{x}.statistics", f"{both}.tiles", f"{both}.sums", f"{both}.bias")
            return Step(f"standard_matmul_bias{activation}", read, (target,), self._epsilon, layer)
        return Step(f"matmul_bias{activation}", (f"{x}.normal", *_affine(name)), (target,), layer=layer)

    def residual(self, source: str, name: str, residual: str, target: str, norm: str, layer: int) -> list[Step]:
        """A product and the residual: one op, or, for many rows, a second one does the next LayerNorm as well."""
        if self._few:
            return [Step("matvec_bias_residual", (source, *_affine(name), residual), (target,), layer=layer)]
        if self._whole:
            written = (target, f"{target}.statistics")
            read = (source, f"{name}.tiles", f"{name}.bias", residual)
            return [Step("group_matmul_bias_residual", read, written, layer=layer)]
        product, inputs = f"{target}.product", (f"{target}.product", residual, *_affine(norm))
        return [
            Step("matmul_bias", (source, *_affine(name)), (product,), layer=layer),
            Step("residual_layernorm", inputs, (target, f"{target}.normal"), self._epsilon, layer),
        ]

    def behind_attention(self, place: str, target: str, following: str, layer: int) -> list[Step]:
        """The rest of a block, from {place}.attention and {place}.in to `target`, whose LayerNorm is `following`."""
        h = f"h.{layer}"
        middle, hidden = f"{place}.middle", f"{place}.hidden"
        return [
            *self.residual(f"{place}.attention", f"{h}.attn.c_proj", f"{place}.in", middle, f"{h}.ln_2", layer),
            self.normal(middle, f"{h}.ln_2", f"{h}.mlp.c_fc", hidden, layer, "_gelu"),
            *self.residual(hidden, f"{h}.mlp.c_proj", middle, target, following, layer),
        ]


def blocks(weights: Weights, rows: int, attention: Callable[[int], Step], last_rows: int | None = None) -> list[Step]:
    """All blocks of a pass over `rows` rows, from h.0.in to h.{layers}.in, each with `attention(layer)` in it. With
    `last_rows`, only the last row of each of so many sequences is wanted: behind the last attention these go on alone,
    as last.in and last.attention, to last.out."""
    ours, last = _Blocks(weights, rows), weights.config.n_layer - 1
    steps = ours.begin("h.0.in", "h.0.ln_1", 0)
    for layer in range(last + 1):
        h = f"h.{layer}"
        steps += [ours.normal(f"{h}.in", f"{h}.ln_1", f"{h}.attn.c_attn", f"{h}.qkv", layer), attention(layer)]
        if layer == last and last_rows is not None:
            steps.append(Step("last_rows", ("all.attention", "all.in", "length"), ("last.attention", "last.in")))
            steps += _Blocks(weights, last_rows).behind_attention("last", "last.out", "ln_f", layer)
        else:
            following = f"h.{layer + 1}.ln_1" if layer < last else "ln_f"
            steps += ours.behind_attention(h, f"h.{layer + 1}.in", following, layer)
    return steps


def is_whole(weights: Weights, rows: int) -> bool:
    """Whether the blocks' LayerNorms and residuals are part of their products: for a few rows, and for as many as the
    GPU can multiply all at once."""
    if rows <= MOST_MATVEC_ROWS:
        return True
    width, inner, some = weights.config.n_embd, weights.config.inner, weights.tensors["wte.weight"]
    shapes = {
        "standard_matmul_bias": (3 * width, width),
        "standard_matmul_bias_gelu": (inner, width),
        "group_matmul_bias_residual": (width, inner),
    }
    return all(
        runs_at_once(find(op), some, {"rows": rows, "outputs": outputs, "inputs": inputs})
        for op, (outputs, inputs) in shapes.items()
    )


def block_parameters(weights: Weights, rows: int) -> Mapping[str, Tensor]:
    """What blocks of `rows` rows may name of them."""
    if rows <= MOST_MATVEC_ROWS or not is_whole(weights, rows):
        return weights.tensors
    return weights.tensors | group_products(weights)


def head_parameters(weights: Weights, rows: int) -> Mapping[str, Tensor]:
    """What the end of a pass may name of them."""
    return weights.tensors if rows <= MOST_MATVEC_ROWS else weights.tensors | padded_head(weights)


def _affine(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


def decode_step(weights: Weights, batch: int, end: str) -> list[Step]:
    """A step of `batch` sequences. It ends with the `logits`, or appends a token to each: the `likeliest`, or what is
    `drawn` as each sequence's sampling parameters have it."""
    config = weights.config

    def attention(layer: int) -> Step:
        h = f"h.{layer}"
        inputs = (f"{h}.q", f"{h}.new_k", f"{h}.new_v", f"{h}.k", f"{h}.v", "length")
        numbers = {"window": config.window or 0, "scale": config.attention_scale(layer)}
        return Step("append_attention", inputs, (f"{h}.heads",), numbers, layer)

    steps = [Step("newest_embedding", ("tokens", "length", "wte.weight", "wpe.weight"), ("h.0.in",))]
    steps += blocks(weights, batch, attention)
    return [*steps, *ending(weights, batch, end, f"h.{config.n_layer}.in")]


def ending(weights: Weights, batch: int, end: str, last: str) -> list[Step]:
    """From the last hidden state to what `end` says."""
    epsilon, eos = {"epsilon": weights.config.layer_norm_epsilon}, {"eos": weights.config.eos_number}
    norm, head, normal = _affine("ln_f"), f"{weights.head}.weight", f"{last}.normal"
    append = Step("append_token", ("token", "logit", *ENDED_BY), numbers=eos)
    few, whole = batch <= MOST_MATVEC_ROWS, is_whole(weights, batch)
    if end == "likeliest" and few:
        return [Step("head_argmax", (last, *norm, head), ("token", "logit"), epsilon), append]
    steps = [Step("layernorm", (last, *norm), (normal,), epsilon)] if whole else []
    if few:
        steps.append(Step("matvec", (normal, head), ("logits",)))
    else:
        steps.append(Step("matmul_bias", (normal, *_affine("padded_head")), ("logits",)))
    if end == "logits":
        return steps
    return [*steps, Step("sample", ("logits", *SAMPLED_BY), ("token", "logit"), eos), append]


def room_for_logits(weights: Weights, rows: int) -> Tensor:
    """Of `rows` rows; those of a padded head are as wide as that, and -inf where there is no token."""
    vocab = weights.config.vocab_size
    return weights.tensors["wte.weight"].new_empty(rows, vocab + (padding(vocab) if rows > MOST_MATVEC_ROWS else 0))


def companions(weights: Weights, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Room for what goes with rows of these names, as `_Blocks` has it. Whatever it is, the next op reads it and nobody
    else, so LayerNorms and products have one place for all."""
    some = next(iter(rows.values()))
    if len(some) <= MOST_MATVEC_ROWS:
        return {}
    if is_whole(weights, len(some)):
        (statistics,) = find("row_statistics").outputs
        shape = statistics.shape({"rows": len(some), "columns": some.shape[1]})
        return {f"{name}.statistics": some.new_empty(shape, dtype=torch.float32) for name in rows}
    normal, product = torch.empty_like(some), torch.empty_like(some)
    return {f"{name}.{kind}": x for name in rows for kind, x in (("normal", normal), ("product", product))}


def on_memory(steps: Sequence[Step], named: Mapping[str, Tensor]) -> list[Bound]:
    """The steps on the buffers of these names."""
    return [
        Bound(step.spec, [named[n] for n in step.inputs], [named[n] for n in step.outputs], step.numbers)
        for step in steps
    ]


def order(layers: int) -> list[str]:
    """Names of what a step computes and any executor can show, as it comes."""
    names = ["h.0.in"]
    for layer in range(layers):
        h = f"h.{layer}"
        names += [f"{h}.qkv", f"{h}.attention", f"{h}.middle", f"{h}.hidden", f"h.{layer + 1}.in"]
    return [*names, "logits"]


def rows_of(state: State, count: int) -> dict[str, Tensor]:
    """What a step reads and writes of a state, and the tokens that it chooses."""
    found: dict[str, Tensor] = {name: getattr(state, name)[:count] for name in {*SAMPLED_BY, *ENDED_BY}}
    found["token"] = torch.empty(count, dtype=torch.long, device=state.device)
    found["logit"] = torch.empty(count, device=state.device)
    return found


def buffers(weights: Weights, state: State, batch: int) -> dict[str, Tensor]:
    """Memory for every name that a step of `batch` sequences mentions: parameters, state and what lies between."""
    config, some = weights.config, weights.tensors["wte.weight"]

    def room(*columns: int) -> Tensor:
        return some.new_empty(batch, *columns)

    found = {**block_parameters(weights, batch), **head_parameters(weights, batch), **rows_of(state, batch)}
    heads, depth = config.n_head, config.head_size
    for layer in range(config.n_layer):
        h = f"h.{layer}"
        qkv = room(3 * config.n_embd)
        q, k, v = qkv.view(batch, 3, heads, 1, depth).unbind(1)
        attention = room(1, heads, depth)
        found |= {f"{h}.qkv": qkv, f"{h}.q": q, f"{h}.new_k": k, f"{h}.new_v": v, f"{h}.heads": attention}
        found |= {f"{h}.k": state.cache.k[layer, :batch], f"{h}.v": state.cache.v[layer, :batch]}
        found[f"{h}.attention"] = attention.view(batch, config.n_embd)
        found |= {f"{h}.hidden": room(config.inner), f"{h}.in": room(config.n_embd), f"{h}.middle": room(config.n_embd)}
    last = f"h.{config.n_layer}.in"
    found |= {last: room(config.n_embd), f"{last}.normal": room(config.n_embd)}
    found["logits"] = room_for_logits(weights, batch)
    found |= companions(weights, {name: x for name, x in found.items() if name.endswith((".in", ".middle"))})
    return found
