"""One decode step as a table: which op of the catalog reads and writes which buffer.

Whoever runs the table decides how: kernel by kernel, as a CUDA graph, or, where there is no GPU, by each op's reference
in torch, so that the table itself is tested on any machine. Buffers go by name; parameters have their checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpline.engine.bind import MOST_OWN_ROWS, Bound, runs_at_once
from warpline.engine.forms import padded_head, padding, standard_name, standard_products
from warpline.engine.state import State
from warpline.kernels.catalog import find
from warpline.kernels.catalog.products import MOST_MATVEC_ROWS
from warpline.kernels.spec import KernelSpec
from warpline.model.weights import Weights

#: What `sample` and `append_token` read of a state, in their order.
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


def blocks(weights: Weights, rows: int, attention: Callable[[int], Step], *, open_end: bool) -> list[Step]:
    """All blocks of a pass over `rows` rows, from h.0.in on, each with `attention(layer)` in it. They end with the last
    one's output, or, with an open end, with its projection, which is still to be added to h.{last}.middle."""
    config = weights.config
    epsilon, last = {"epsilon": config.layer_norm_epsilon}, config.n_layer - 1
    few, whole, steps = rows <= MOST_MATVEC_ROWS, is_whole(weights, rows), list[Step]()

    def normal_product(norm: str, name: str, source: str, target: str, layer: int, activation: str = "") -> None:
        """LayerNorm and a product of it: one op, or, for many rows, the LayerNorm is there already."""
        if few:
            op, inputs = f"layernorm_matvec_bias{activation}", (source, *_affine(norm), *_affine(name))
            steps.append(Step(op, inputs, (target,), epsilon, layer))
        elif whole:
            both = standard_name(norm, name)
            read = (source, f"{source}.statistics", f"{both}.weight", f"{both}.sums", f"{both}.bias")
            steps.append(Step(f"standard_matmul_bias{activation}", read, (target,), epsilon, layer))
        else:
            op = f"matmul_bias{activation}"
            steps.append(Step(op, (f"{norm}.out", *_affine(name)), (target,), layer=layer))

    def residual_product(name: str, source: str, residual: str, target: str, norm: str, layer: int) -> None:
        """A product and the residual: one op, or, for many rows, a second one does the next LayerNorm as well."""
        if few:
            steps.append(Step("matvec_bias_residual", (source, *_affine(name), residual), (target,), layer=layer))
        elif whole:
            written = (target, f"{target}.statistics")
            steps.append(Step("group_matmul_bias_residual", (source, *_affine(name), residual), written, layer=layer))
        else:
            steps.append(Step("matmul_bias", (source, *_affine(name)), (f"{name}.out",), layer=layer))
            inputs = (f"{name}.out", residual, *_affine(norm))
            steps.append(Step("residual_layernorm", inputs, (target, f"{norm}.out"), epsilon, layer))

    if whole and not few:
        steps.append(Step("row_statistics", ("h.0.in",), ("h.0.in.statistics",), layer=0))
    elif not whole:
        steps.append(Step("layernorm", ("h.0.in", *_affine("h.0.ln_1")), ("h.0.ln_1.out",), epsilon, 0))
    for layer in range(config.n_layer):
        h, projection = f"h.{layer}", f"h.{layer}.mlp.c_proj"
        normal_product(f"{h}.ln_1", f"{h}.attn.c_attn", f"{h}.in", f"{h}.qkv", layer)
        steps.append(attention(layer))
        residual_product(f"{h}.attn.c_proj", f"{h}.attention", f"{h}.in", f"{h}.middle", f"{h}.ln_2", layer)
        normal_product(f"{h}.ln_2", f"{h}.mlp.c_fc", f"{h}.middle", f"{h}.hidden", layer, "_gelu")
        if layer == last and open_end:
            steps.append(
                Step("matmul_bias", (f"{h}.hidden", *_affine(projection)), (f"{projection}.out",), layer=layer)
            )
        else:
            following = f"h.{layer + 1}.ln_1" if layer < last else "ln_f"
            residual_product(projection, f"{h}.hidden", f"{h}.middle", f"h.{layer + 1}.in", following, layer)
    return steps


def is_whole(weights: Weights, rows: int) -> bool:
    """Whether the blocks' LayerNorms and residuals are part of their products: for a few rows, and where the GPU can
    have all of a product on its way at once."""
    if rows <= MOST_MATVEC_ROWS:
        return True
    width, inner, some = weights.config.n_embd, weights.config.inner, weights.tensors["wte.weight"]
    shapes = {
        "standard_matmul_bias": (3 * width, width),
        "standard_matmul_bias_gelu": (inner, width),
        "group_matmul_bias_residual": (width, inner),
    }
    return rows <= MOST_OWN_ROWS and all(
        runs_at_once(find(op), some, {"rows": rows, "outputs": outputs, "inputs": inputs})
        for op, (outputs, inputs) in shapes.items()
    )


def block_parameters(weights: Weights, rows: int) -> Mapping[str, Tensor]:
    """What blocks of `rows` rows may name of them."""
    if rows <= MOST_MATVEC_ROWS or not is_whole(weights, rows):
        return weights.tensors
    return weights.tensors | standard_products(weights)


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
    steps += blocks(weights, batch, attention, open_end=False)
    return [*steps, *_ending(weights, batch, end, f"h.{config.n_layer}.in", normal=not is_whole(weights, batch))]


def _ending(weights: Weights, batch: int, end: str, last: str, *, normal: bool) -> list[Step]:
    """From the last hidden state, of which ln_f.out may be there already, to what `end` says."""
    epsilon, eos = {"epsilon": weights.config.layer_norm_epsilon}, {"eos": weights.config.eos_number}
    few, norm = batch <= MOST_MATVEC_ROWS, ("ln_f.weight", "ln_f.bias")
    head = f"{weights.head}.weight"
    append = Step("append_token", ("token", "logit", *ENDED_BY), numbers=eos)
    if end == "likeliest" and few:
        return [Step("head_argmax", (last, *norm, head), ("token", "logit"), epsilon), append]
    steps = [] if normal else [Step("layernorm", (last, *norm), ("ln_f.out",), epsilon)]
    if few:
        steps.append(Step("matvec", ("ln_f.out", head), ("logits",)))
    else:
        steps.append(Step("matmul_bias", ("ln_f.out", *_affine("padded_head")), ("logits",)))
    if end == "logits":
        return steps
    return [*steps, Step("sample", ("logits", *SAMPLED_BY), ("token", "logit"), eos), append]


def room_for_logits(weights: Weights, rows: int) -> Tensor:
    """Of `rows` rows; those of a padded head are as wide as that, and -inf where there is no token."""
    vocab = weights.config.vocab_size
    return weights.tensors["wte.weight"].new_empty(rows, vocab + (padding(vocab) if rows > MOST_MATVEC_ROWS else 0))


def ending(weights: Weights, state: State, end: str, last: Tensor, logits: Tensor) -> list[Bound]:
    """The end of a step alone, for the first rows of `state`, from a hidden state for each."""
    named = {**head_parameters(weights, len(last)), **_rows_of(state, len(last))}
    named |= {"last": last, "ln_f.out": torch.empty_like(last), "logits": logits}
    return on_memory(_ending(weights, len(last), end, "last", normal=False), named)


def with_statistics(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Room for what a product leaves about the rows that it writes."""
    return {
        f"{name}.statistics": x.new_empty(x.shape[1] // 16, len(x), 2, dtype=torch.float32) for name, x in rows.items()
    }


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


def _rows_of(state: State, count: int) -> dict[str, Tensor]:
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

    found = {**block_parameters(weights, batch), **head_parameters(weights, batch), **_rows_of(state, batch)}
    heads, depth = config.n_head, config.head_size
    for layer in range(config.n_layer):
        h = f"h.{layer}"
        qkv = room(3 * config.n_embd)
        q, k, v = qkv.view(batch, 3, heads, 1, depth).unbind(1)
        attention = room(1, heads, depth)
        found |= {f"{h}.qkv": qkv, f"{h}.q": q, f"{h}.new_k": k, f"{h}.new_v": v, f"{h}.heads": attention}
        found |= {f"{h}.k": state.cache.k[layer, :batch], f"{h}.v": state.cache.v[layer, :batch]}
        found[f"{h}.attention"] = attention.view(batch, config.n_embd)
        found[f"{h}.hidden"] = room(config.inner)
        for name in ("in", "middle", "ln_1.out", "ln_2.out", "attn.c_proj.out", "mlp.c_proj.out"):
            found[f"{h}.{name}"] = room(config.n_embd)
    found[f"h.{config.n_layer}.in"], found["ln_f.out"] = room(config.n_embd), room(config.n_embd)
    found |= with_statistics({name: x for name, x in found.items() if name.endswith((".in", ".middle"))})
    found["logits"] = room_for_logits(weights, batch)
    return found
