"""A pass as a table: which op of the catalog reads and writes which buffer.

The table can be run kernel by kernel, as a CUDA graph, or without a GPU by each op's reference in torch, so it can be
tested on any machine. Buffers have names; parameters have their checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from warpline.engine.executors.graph.bind import Bound, suits
from warpline.engine.executors.graph.forms import (
    EXPANDED,
    expanded,
    group_products,
    padded_head,
    padding,
    standard_name,
)
from warpline.engine.slots import Slots
from warpline.kernels.catalog import find
from warpline.kernels.catalog.products import CODED, MOST_MATVEC_ROWS
from warpline.kernels.spec import KernelSpec
from warpline.model.quantise import SCALE
from warpline.model.weights import Weights

#: Fields of slots that `sample` and `append_token` read, in argument order; together, all that a step needs of them.
SAMPLED_BY = (
    "tokens", "length", "noise", "temperature", "top_k", "top_p", "min_p", "penalty", "min_length", "stops_at_eos",
    "biased", "bias",
)  # fmt: skip
ENDED_BY = (
    "known", "limit", "stops_at_eos", "biased", "presence", "frequency", "tokens", "length", "done", "not_finite",
    "bias", "counts",
)  # fmt: skip
STATE = (*dict.fromkeys(SAMPLED_BY + ENDED_BY),)
#: Tensors of a layer's KV cache, in the order of `KVCache.tensors` and of the attention ops' arguments.
CACHE, CODED_CACHE = ("cache_k", "cache_v"), ("cache_k", "cache_v", "cache_scales")


class Regime(Enum):
    """How the products of a pass are computed."""

    FEW = auto()  # rows stay in registers: LayerNorm, product and residual are one op
    WHOLE = auto()  # one product of all rows includes LayerNorm and residual
    #: Plain products, ours or a library's, with LayerNorm and residual between them; int8 weights are expanded first.
    MANY = auto()


class End(Enum):
    """What a pass ends with."""

    NOTHING = auto()  # only keys and values are wanted
    LIKELIEST = auto()  # the likeliest token is appended
    DRAWN = auto()  # a token is drawn with each sequence's sampling parameters and appended


@dataclass(frozen=True, slots=True)
class OpCall:
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


@dataclass(frozen=True, slots=True)
class PassRules:
    """What decides the ops of a pass: the model, whether the bits of a row must be independent of the other rows
    (`invariant`), and whether the KV cache holds codes."""

    weights: Weights
    invariant: bool = False
    kv_codes: bool = False

    @property
    def coded(self) -> str:
        """Suffix of the names of ops that read matrices as they are stored."""
        return CODED if self.weights.is_quantised else ""

    def matrix(self, module: str) -> tuple[str, ...]:
        """Return the names of the buffers of a module's matrix: the matrix, or codes and scales."""
        name = f"{module}.weight"
        return (name, name + SCALE) if self.weights.is_quantised else (name,)

    def regime(self, rows: int) -> Regime:
        """Return how products of so many rows are computed. Invariant: the same for every number of rows."""
        if rows <= MOST_MATVEC_ROWS and not self.invariant:
            return Regime.FEW
        if self.weights.is_quantised:  # the others would need a second, plain copy of all matrices
            return Regime.MANY
        weights = self.weights
        width, inner = weights.config.n_embd, weights.config.inner
        shapes = {
            "standard_matmul_bias": (3 * width, width),
            "standard_matmul_bias_gelu": (inner, width),
            "group_matmul_bias_residual": (width, inner),
        }
        whole = all(
            suits(
                find(op),
                weights.device,
                weights.activations,
                {"rows": rows, "outputs": outputs, "inputs": inputs},
                invariant=self.invariant,
            )
            for op, (outputs, inputs) in shapes.items()
        )
        return Regime.WHOLE if whole else Regime.MANY

    def end(self, rows: int, *, likeliest: bool) -> End:
        """Return how a step of so many sequences ends. Only few rows have a shortcut to the likeliest token; beyond
        that the step does not depend on what sequences ask for, so one that joins changes nothing."""
        return End.LIKELIEST if likeliest and self.regime(rows) is Regime.FEW else End.DRAWN


class _Blocks:
    """The ops of layers over `rows` rows. Rows x come with their LayerNorm x.normal or with x.statistics, where the
    next product needs these; the op before it writes them."""

    def __init__(self, rules: PassRules, rows: int):
        self._regime, self._rules = rules.regime(rows), rules
        self._epsilon = {"epsilon": rules.weights.config.layer_norm_epsilon}

    def begin(self, x: str, norm: str, layer: int) -> list[OpCall]:
        """Return the op that makes x.normal or x.statistics, for rows that no product wrote."""
        if self._regime is Regime.FEW:
            return []
        if self._regime is Regime.WHOLE:
            return [OpCall("row_statistics", (x,), (f"{x}.statistics",), layer=layer)]
        return [OpCall("layernorm", (x, *_affine(norm)), (f"{x}.normal",), self._epsilon, layer)]

    def _product(self, op: str, x: str, name: str, target: str, layer: int) -> list[OpCall]:
        """Return a plain product, after the expansion of int8 weights."""
        before, weight = as_numbers(self._rules, name, f"{name}{EXPANDED}", layer)
        return [*before, OpCall(op, (x, weight, f"{name}.bias"), (target,), layer=layer)]

    def normal(self, x: str, norm: str, name: str, target: str, layer: int, activation: str = "") -> list[OpCall]:
        """Return a LayerNorm and a product: one op, or with many rows only the product, because the LayerNorm is there
        already."""
        if self._regime is Regime.FEW:
            op = f"layernorm_matvec_bias{activation}{self._rules.coded}"
            inputs = (x, *_affine(norm), *self._rules.matrix(name), f"{name}.bias")
            return [OpCall(op, inputs, (target,), self._epsilon, layer)]
        if self._regime is Regime.WHOLE:
            both = standard_name(norm, name)
            read = (x, f"{x}.statistics", f"{both}.tiles", f"{both}.sums", f"{both}.bias")
            return [OpCall(f"standard_matmul_bias{activation}", read, (target,), self._epsilon, layer)]
        return self._product(f"matmul_bias{activation}", f"{x}.normal", name, target, layer)

    def residual(self, source: str, name: str, residual: str, target: str, norm: str, layer: int) -> list[OpCall]:
        """Return a product and the residual: one op, or with many rows a second op that does the next LayerNorm as
        well."""
        if self._regime is Regime.FEW:
            inputs = (source, *self._rules.matrix(name), f"{name}.bias", residual)
            return [OpCall(f"matvec_bias_residual{self._rules.coded}", inputs, (target,), layer=layer)]
        if self._regime is Regime.WHOLE:
            written = (target, f"{target}.statistics")
            read = (source, f"{name}.tiles", f"{name}.bias", residual)
            return [OpCall("group_matmul_bias_residual", read, written, layer=layer)]
        product, inputs = f"{target}.product", (f"{target}.product", residual, *_affine(norm))
        return [
            *self._product("matmul_bias", source, name, product, layer),
            OpCall("residual_layernorm", inputs, (target, f"{target}.normal"), self._epsilon, layer),
        ]

    def behind_attention(self, place: str, target: str, following: str, layer: int) -> list[OpCall]:
        """Return the rest of a layer, from {place}.attention and {place}.in to `target`; `following` is the next
        LayerNorm."""
        h = f"h.{layer}"
        middle, hidden = f"{place}.middle", f"{place}.hidden"
        return [
            *self.residual(f"{place}.attention", f"{h}.attn.c_proj", f"{place}.in", middle, f"{h}.ln_2", layer),
            *self.normal(middle, f"{h}.ln_2", f"{h}.mlp.c_fc", hidden, layer, "_gelu"),
            *self.residual(hidden, f"{h}.mlp.c_proj", middle, target, following, layer),
        ]


def as_numbers(rules: PassRules, module: str, room: str, layer: int | None = None) -> tuple[list[OpCall], str]:
    """Return the ops that expand a module's int8 matrix into `room` (none if it is plain), and the name of the plain
    matrix."""
    if not rules.weights.is_quantised:
        return [], f"{module}.weight"
    return [OpCall("expand", rules.matrix(module), (room,), layer=layer)], room


def blocks(
    rules: PassRules, rows: int, attention: Callable[[int], list[OpCall]], last_rows: int | None = None
) -> list[OpCall]:
    """Return all layers of a pass over `rows` rows, from h.0.in to h.{layers}.in, with the ops of `attention(layer)`.
    With `last_rows`, only so many rows are wanted, those in the table `last`: after the last attention only these go
    on, as last.in and last.attention, to last.out. With 0 the pass ends there."""
    ours, last = _Blocks(rules, rows), rules.weights.config.n_layer - 1
    steps = ours.begin("h.0.in", "h.0.ln_1", 0)
    for layer in range(last + 1):
        h = f"h.{layer}"
        steps += [*ours.normal(f"{h}.in", f"{h}.ln_1", f"{h}.attn.c_attn", f"{h}.qkv", layer), *attention(layer)]
        if layer == last and last_rows is not None:
            if last_rows:
                steps.append(OpCall("last_rows", ("all.attention", "all.in", "last"), ("last.attention", "last.in")))
                steps += _Blocks(rules, last_rows).behind_attention("last", "last.out", "ln_f", layer)
        else:
            following = f"h.{layer + 1}.ln_1" if layer < last else "ln_f"
            steps += ours.behind_attention(h, f"h.{layer + 1}.in", following, layer)
    return steps


def block_parameters(rules: PassRules, rows: int) -> Mapping[str, Tensor]:
    """Return the parameters that layers of `rows` rows may name."""
    weights, regime = rules.weights, rules.regime(rows)
    if regime is Regime.WHOLE:
        return weights.tensors | group_products(weights)
    return weights.tensors | expanded(weights) if regime is Regime.MANY and rules.coded else weights.tensors


def head_parameters(rules: PassRules, rows: int) -> Mapping[str, Tensor]:
    """Return the parameters that the end of a pass may name."""
    weights = rules.weights
    return weights.tensors if rules.regime(rows) is Regime.FEW else weights.tensors | padded_head(weights)


def _affine(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


def decode_step(rules: PassRules, rows: int, end: End) -> list[OpCall]:
    """Return a decode step of `rows` sequences."""
    config = rules.weights.config

    op, cache = ("append_attention_int8", CODED_CACHE) if rules.kv_codes else ("append_attention", CACHE)

    def attention(layer: int) -> list[OpCall]:
        h = f"h.{layer}"
        inputs = (*(f"{h}.{name}" for name in ("q", "new_k", "new_v", *cache)), "length", "lanes")
        numbers = {"window": config.window or 0, "scale": config.attention_scale(layer)}
        return [OpCall(op, inputs, (f"{h}.heads",), numbers, layer)]

    embedded = ("tokens", "length", "lanes", *rules.matrix("wte"), "wpe.weight")
    steps = [OpCall(f"newest_embedding{rules.coded}", embedded, ("h.0.in",))]
    steps += blocks(rules, rows, attention)
    return [*steps, *ending(rules, rows, end, f"h.{config.n_layer}.in")]


def ending(rules: PassRules, rows: int, end: End, last: str) -> list[OpCall]:
    """Return the ops from the last hidden state to what `end` says."""
    if end is End.NOTHING:
        return []
    weights, kind = rules.weights, rules.regime(rows)
    epsilon, eos = {"epsilon": weights.config.layer_norm_epsilon}, {"eos": weights.config.eos_number}
    norm, head, normal = _affine("ln_f"), rules.matrix(weights.head), f"{last}.normal"
    append = OpCall("append_token", ("token", "logit", "lanes", *ENDED_BY), numbers=eos)
    if end is End.LIKELIEST and kind is Regime.FEW:
        return [OpCall(f"head_argmax{rules.coded}", (last, *norm, *head), ("token", "logit"), epsilon), append]
    steps = [] if kind is Regime.MANY else [OpCall("layernorm", (last, *norm), (normal,), epsilon)]
    if kind is Regime.FEW:
        steps.append(OpCall(f"matvec{rules.coded}", (normal, *head), ("logits",)))
    else:
        steps += as_numbers(rules, weights.head, f"padded_head{EXPANDED}")[0]
        steps.append(OpCall("matmul_bias", (normal, *_affine("padded_head")), ("logits",)))
    return [*steps, OpCall("sample", ("logits", *SAMPLED_BY, "lanes"), ("token", "logit"), eos), append]


def shortened(named: Mapping[str, Tensor], layers: int, positions: int) -> dict[str, Tensor]:
    """Return the same memory with only so many positions of the cache: kernels are chosen for that context length."""
    caches = [n for layer in range(layers) for name in CODED_CACHE if (n := f"h.{layer}.{name}") in named]
    return {**named, **{name: named[name][:, :, :positions] for name in caches}}


def room_for_logits(rules: PassRules, rows: int) -> Tensor:
    """Allocate logits of `rows` rows; with a padded head the columns beyond the vocabulary will be -inf."""
    vocab = rules.weights.config.vocab_size
    width = vocab if rules.regime(rows) is Regime.FEW else vocab + padding(vocab)
    return rules.weights.room(rows, width)


def companions(
    rules: PassRules, rows: Mapping[str, Tensor], room: tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """Allocate what accompanies rows of these names, as `_Blocks` describes it. Only the next op reads it, so all
    LayerNorms and all products share one buffer each, which may be given."""
    like = next(iter(rows.values()))
    kind = rules.regime(len(like))
    if kind is Regime.FEW:
        return {}
    if kind is Regime.WHOLE:
        (statistics,) = find("row_statistics").outputs
        shape = statistics.shape({"rows": len(like), "columns": like.shape[1]})
        return {f"{name}.statistics": like.new_empty(shape, dtype=torch.float32) for name in rows}
    normal, product = room or (torch.empty_like(like), torch.empty_like(like))
    return {f"{name}.{kind}": x for name in rows for kind, x in (("normal", normal), ("product", product))}


def on_memory(steps: Sequence[OpCall], named: Mapping[str, Tensor]) -> list[Bound]:
    """Bind the names of the steps to buffers."""
    return [
        Bound(step.spec, [named[n] for n in step.inputs], [named[n] for n in step.outputs], step.numbers)
        for step in steps
    ]


def order(layers: int) -> list[str]:
    """Return the names of values that a step computes and every executor can show, in the order of computation."""
    names = ["h.0.in"]
    for layer in range(layers):
        h = f"h.{layer}"
        names += [f"{h}.qkv", f"{h}.attention", f"{h}.middle", f"{h}.hidden", f"h.{layer + 1}.in"]
    return [*names, "logits"]


def of_slots(slots: Slots, rows: int) -> dict[str, Tensor]:
    """Return the fields of slots that a step reads and writes, and memory for the tokens that it chooses."""
    found: dict[str, Tensor] = {name: getattr(slots, name) for name in STATE}
    found["token"] = torch.empty(rows, dtype=torch.long, device=slots.device)
    found["logit"] = torch.empty(rows, device=slots.device)
    return found


def of_cache(slots: Slots, layer: int) -> dict[str, Tensor]:
    """Return a layer's tensors of the KV cache."""
    tensors = slots.cache.tensors
    return {name: tensor[layer] for name, tensor in zip(CODED_CACHE[: len(tensors)], tensors, strict=True)}


def buffers(rules: PassRules, slots: Slots, lanes: Tensor) -> dict[str, Tensor]:
    """Allocate memory for every name in a step of these lanes: parameters, slots and intermediate buffers."""
    config, rows = rules.weights.config, len(lanes)

    def room(*columns: int) -> Tensor:
        return rules.weights.room(rows, *columns)

    found = {**block_parameters(rules, rows), **head_parameters(rules, rows), **of_slots(slots, rows)}
    found["lanes"] = lanes
    heads, depth = config.n_head, config.head_size
    for layer in range(config.n_layer):
        h = f"h.{layer}"
        qkv = room(3 * config.n_embd)
        q, k, v = qkv.view(rows, 3, heads, 1, depth).unbind(1)
        attention = room(1, heads, depth)
        found |= {f"{h}.qkv": qkv, f"{h}.q": q, f"{h}.new_k": k, f"{h}.new_v": v, f"{h}.heads": attention}
        found |= {f"{h}.{name}": tensor for name, tensor in of_cache(slots, layer).items()}
        found[f"{h}.attention"] = attention.view(rows, config.n_embd)
        found |= {f"{h}.hidden": room(config.inner), f"{h}.in": room(config.n_embd), f"{h}.middle": room(config.n_embd)}
    last = f"h.{config.n_layer}.in"
    found |= {last: room(config.n_embd), f"{last}.normal": room(config.n_embd)}
    found["logits"] = room_for_logits(rules, rows)
    found |= companions(rules, {name: x for name, x in found.items() if name.endswith((".in", ".middle"))})
    return found
