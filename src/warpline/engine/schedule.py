"""One decode step as a table: which op of the catalog reads and writes which buffer.

Whoever runs the table decides how: kernel by kernel, as a CUDA graph, or, where there is no GPU, by each op's reference
in torch, so that the table itself is tested on any machine. Buffers go by name; parameters have their checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from warpline.engine.bind import MOST_OWN_ROWS, Bound
from warpline.engine.state import State
from warpline.kernels.catalog import find
from warpline.kernels.catalog.products import MOST_MATVEC_ROWS
from warpline.kernels.spec import KernelSpec
from warpline.model.weights import Weights

#: Where a library computes the logits it gets a vocabulary of a multiple of these: 256 rows take it 38 µs with 50,304
#: tokens and 212 with GPT-2's 50,257 (H200).
VOCAB_STEP = 64
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
    few, steps = rows <= MOST_MATVEC_ROWS, list[Step]()

    def normal_product(norm: str, name: str, source: str, target: str, layer: int, activation: str = "") -> None:
        """LayerNorm and a product of it: one op for a few rows; for many the LayerNorm is there already."""
        if few:
            op, inputs = f"layernorm_matvec_bias{activation}", (source, *_affine(norm), *_affine(name))
            steps.append(Step(op, inputs, (target,), epsilon, layer))
        else:
            op = f"matmul_bias{activation}"
            steps.append(Step(op, (f"{norm}.out", *_affine(name)), (target,), layer=layer))

    def residual_product(name: str, source: str, residual: str, target: str, norm: str, layer: int) -> None:
        """A product and the residual: one op for a few rows; for many a second one does the next LayerNorm as well."""
        if few:
            inputs = (source, *_affine(name), residual)
            steps.append(Step("matvec_bias_residual", inputs, (target,), layer=layer))
        else:
            steps.append(Step("matmul_bias", (source, *_affine(name)), (f"{name}.out",), layer=layer))
            inputs = (f"{name}.out", residual, *_affine(norm))
            steps.append(Step("residual_layernorm", inputs, (target, f"{norm}.out"), epsilon, layer))

    if not few:
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
    return [*steps, *_ending(weights, batch, end, f"h.{config.n_layer}.in", normal=batch > MOST_MATVEC_ROWS)]


def _ending(weights: Weights, batch: int, end: str, last: str, *, normal: bool) -> list[Step]:
    """From the last hidden state, of which ln_f.out may be there already, to what `end` says."""
    epsilon, eos = {"epsilon": weights.config.layer_norm_epsilon}, {"eos": weights.config.eos_number}
    few, norm = batch <= MOST_MATVEC_ROWS, ("ln_f.weight", "ln_f.bias")
    head = f"{weights.head}.weight"
    append = Step("append_token", ("token", "logit", *ENDED_BY), numbers=eos)
    if end == "likeliest" and few:
        return [Step("head_argmax", (last, *norm, head), ("token", "logit"), epsilon), append]
    steps = [] if normal else [Step("layernorm", (last, *norm), ("ln_f.out",), epsilon)]
    if batch > MOST_OWN_ROWS:
        steps.append(Step("matmul_bias", ("ln_f.out", *_affine("padded_head")), ("logits",)))
    else:
        steps.append(Step("matvec" if few else "matmul", ("ln_f.out", head), ("logits",)))
    if end == "logits":
        return steps
    return [*steps, Step("sample", ("logits", *SAMPLED_BY), ("token", "logit"), eos), append]


def room_for_logits(weights: Weights, rows: int) -> Tensor:
    """Of `rows` rows; those of a padded head are as wide as that, and -inf where there is no token."""
    vocab = weights.config.vocab_size
    return weights.tensors["wte.weight"].new_empty(rows, vocab + (_padding(vocab) if rows > MOST_OWN_ROWS else 0))


def _padding(vocab: int) -> int:
    return -vocab % VOCAB_STEP


def padded_head(weights: Weights, state: State, rows: int) -> dict[str, Tensor]:
    """The LM head for many rows, made when it is first needed."""
    if rows <= MOST_OWN_ROWS:
        return {}
    if "padded_head" not in state.kept:
        head = weights.tensors[f"{weights.head}.weight"]
        pad = _padding(len(head))
        bias = F.pad(head.new_zeros(len(head)), (0, pad), value=-torch.inf)
        state.kept["padded_head"] = {"padded_head.weight": F.pad(head, (0, 0, 0, pad)), "padded_head.bias": bias}
    made: dict[str, Tensor] = state.kept["padded_head"]
    return made


def ending(weights: Weights, state: State, end: str, last: Tensor, logits: Tensor) -> list[Bound]:
    """The end of a step alone, for the first rows of `state`, from a hidden state for each."""
    named = weights.tensors | _rows_of(state, len(last)) | padded_head(weights, state, len(last))
    named |= {"last": last, "ln_f.out": torch.empty_like(last), "logits": logits}
    return on_memory(_ending(weights, len(last), end, "last", normal=False), named)


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

    found = weights.tensors | _rows_of(state, batch) | padded_head(weights, state, batch)
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
    found["logits"] = room_for_logits(weights, batch)
    return found
