"""From the last hidden state to a token: the LM head's likeliest token, and a draw from logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from warpline.config import DTYPE_BYTES
from warpline.kernels.arguments import (
    BITS,
    CODES,
    FLAG,
    FLOAT,
    LONG_BITS,
    STORAGE,
    Dims,
    Scalar,
    between,
    count_of,
    distinct,
    index_into,
    matrix,
    often,
    reads,
    scratch,
    writes,
)
from warpline.kernels.catalog.products import (
    CODED,
    CODED_DTYPES,
    matvec_allows,
    on_tensor_cores,
    row_pitch,
    weights_of,
)
from warpline.kernels.noise import gumbel
from warpline.kernels.spec import THREADS_PER_WARP, KernelSpec, Launch, Tunables

if TYPE_CHECKING:
    from torch import Tensor


def _logits(x: Tensor, gamma: Tensor, beta: Tensor, *head: Tensor, epsilon: float) -> Tensor:
    """Return the logits of a head in floating point, or as codes and scales."""
    from torch.nn import functional as F

    weight = weights_of(iter(head), x, coded=len(head) > 1)
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, epsilon), weight)


def _likeliest(*inputs: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    best = _logits(*inputs, epsilon=epsilon).max(dim=-1)
    return best.indices, best.values


def _head_launch(dims: Dims, tunables: Tunables, dtype: str) -> Launch:
    per_block = tunables["warps"] * tunables["outputs_each"] * tunables["repeat"]
    shared = dims["rows"] * row_pitch(dims["inputs"]) * DTYPE_BYTES[dtype]
    return Launch(-(-dims["outputs"] // per_block), tunables["warps"] * THREADS_PER_WARP, shared)


def _head_defaults(dims: Dims, dtype: str, *, coded: bool) -> Tunables:
    """Return long-lived blocks, a few per SM of a large GPU, because each normalises the rows itself."""
    narrow = dims["inputs"] * DTYPE_BYTES[dtype] <= 2048
    if on_tensor_cores(dims, dtype, coded=coded):
        each, unroll, repeat = 16, 4 if coded else 2, 3
    else:
        each, unroll, repeat = 1 if narrow else 2, 4, 12
    return {"warps": 8, "outputs_each": each, "unroll": unroll, "repeat": repeat if dims["outputs"] > 16384 else 1}


def _head(rows: int, outputs: int, inputs: int) -> Dims:
    return {"rows": rows, "outputs": outputs, "inputs": inputs}


def _head_argmax(*, coded: bool) -> KernelSpec:
    return KernelSpec(
        name="head_argmax" + CODED * coded,
        summary="final LayerNorm, LM head and the likeliest token of 1 to 8 rows; logits are never stored"
        + ", of int8 weights" * coded,
        header="ops/matvec.cuh",
        function="head_argmax",
        awaits=True,
        arguments=(
            reads("x", "rows inputs"),
            reads("gamma", "inputs"),
            reads("beta", "inputs"),
            *matrix("weight", "outputs inputs", coded=coded),
            writes("token", "rows", index_into("outputs")),
            writes("logit", "rows", FLOAT),
            scratch("best", "rows", LONG_BITS),
            scratch("finished", "1", BITS),
            Scalar("epsilon", 1e-5),
        ),
        types=(CODES if coded else STORAGE,),
        constants=("outputs", "inputs", "rows"),
        tunables={
            "warps": (8, 16, 4),
            "outputs_each": (2, 1, 4, 8, 16),
            "unroll": (4, 2, 8),
            "repeat": (6, 1, 2, 3, 12),
        },
        allows=partial(matvec_allows, coded=coded),
        default=lambda dims, dtype, _arch: _head_defaults(dims, dtype, coded=coded),
        launch=_head_launch,
        flops=lambda dims: 2 * dims["rows"] * dims["inputs"] * dims["outputs"],
        reference=_likeliest,
        scores=_logits,
        dtypes=CODED_DTYPES if coded else tuple(DTYPE_BYTES),
        test_dims=(
            *(_head(rows, 1000, 768) for rows in range(1, 9)),
            *(_head(2, n, n) for n in (1, 2, 3, 63, 64, 65, 127, 129, 1023)),
            _head(3, 50257, 256),
        ),
        bench_dims=(_head(1, 50257, 768), _head(8, 50257, 768), _head(1, 50257, 1600)),
    )


HEAD_ARGMAXES = tuple(_head_argmax(coded=coded) for coded in (False, True))


def _scores(
    logits: Tensor,
    tokens: Tensor,
    length: Tensor,
    noise: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    penalty: Tensor,
    min_length: Tensor,
    stops_at_eos: Tensor,
    biased: Tensor,
    bias: Tensor,
    lanes: Tensor,
    *,
    eos: int,
) -> Tensor:
    """Return the values of which a draw takes the largest: scaled logits plus noise, -inf for excluded tokens."""
    import torch

    rows, vocab = logits.shape
    tokens, length, noise, temperature = tokens[lanes], length[lanes], noise[lanes], temperature[lanes]
    top_k, top_p, min_p, penalty = top_k[lanes], top_p[lanes], min_p[lanes], penalty[lanes]
    keys = noise.gather(1, length.clamp(max=noise.shape[1] - 1)[:, None])[:, 0]
    forbidden = torch.where(stops_at_eos[lanes] & (length < min_length[lanes]), eos, -1)
    past = torch.arange(tokens.shape[1], device=logits.device) < length[:, None]
    seen = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter_(1, tokens.where(past, vocab), True)[:, :vocab]
    factor = penalty.to(logits.dtype)[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    added = torch.where(biased[lanes, None], bias[lanes], 0).to(logits.dtype)
    logits = logits + torch.nn.functional.pad(added, (0, vocab - added.shape[1]))  # logits may be padded
    logits = logits.masked_fill(torch.arange(vocab, device=logits.device) == forbidden[:, None], -torch.inf)
    greedy = temperature[:, None] <= 0
    scaled = logits / temperature[:, None].where(~greedy, 1).to(logits.dtype)

    ranked = scaled.sort(dim=-1, descending=True).values
    kth = ranked.gather(1, top_k.clamp(max=vocab)[:, None] - 1)
    probability = ranked.where(ranked >= kth, -torch.inf).softmax(dim=-1)
    likelier = probability.cumsum(dim=-1) - probability
    inside = (likelier < top_p[:, None]) | (top_p[:, None] >= 1)
    lowest = ranked.where(inside & (ranked >= kth), torch.inf).amin(dim=-1, keepdim=True)
    floor = ranked[:, :1] + min_p.to(logits.dtype)[:, None].log()
    kept = scaled.masked_fill((scaled < lowest) | (scaled < floor), -torch.inf)
    return torch.where(greedy, scaled, kept + gumbel(keys, vocab).to(logits.dtype))


def _draw(logits: Tensor, *others: Tensor, eos: int) -> tuple[Tensor, ...]:
    return _scores(logits, *others, eos=eos).argmax(dim=-1), logits.amax(dim=-1)


def _sampling(rows: int, vocab: int, capacity: int) -> Dims:
    """Return dimensions of sampling; with a vocabulary of 1,024 the logits are padded: there are fewer tokens."""
    return {"rows": rows, "vocab": vocab, "slots": rows + 1, "capacity": capacity, "entries": vocab - (vocab == 1024)}


def _sample_defaults(dims: Dims, _dtype: str, _arch: str) -> Tunables:
    # One block per row, so the loads in flight decide.
    return {"block": 1024, "unroll": 8} if dims["vocab"] > 4096 else {"block": 256, "unroll": 2}


SAMPLE = KernelSpec(
    name="sample",
    summary="the next token: penalties, biases, temperature, top-k, top-p, min-p and a reproducible draw",
    header="ops/sample.cuh",
    awaits=True,
    arguments=(
        reads("logits", "rows vocab"),
        reads("tokens", "slots capacity", index_into("vocab"), touched="rows capacity"),
        reads("length", "slots", count_of("capacity"), touched="rows"),
        reads("noise", "slots capacity", BITS, touched="rows 1"),
        reads("temperature", "slots", between(-0.3, 1.5), touched="rows"),
        reads("top_k", "slots", count_of("vocab"), touched="rows"),
        reads("top_p", "slots", between(0.05, 1.3), touched="rows"),
        reads("min_p", "slots", between(0.0, 0.2), touched="rows"),
        reads("penalty", "slots", often(1.0, 0.8, 1.5, "slots"), touched="rows"),
        reads("min_length", "slots", count_of("capacity"), touched="rows"),
        reads("stops_at_eos", "slots", FLAG, touched="rows"),
        reads("biased", "slots", FLAG, touched="rows"),
        reads("bias", "slots entries", FLOAT, touched="rows"),  # touched by few rows: most have none
        reads("lanes", "rows", distinct("rows", "slots")),
        writes("token", "rows", index_into("vocab")),
        writes("logit", "rows", FLOAT),
        Scalar("capacity"),
        Scalar("entries"),
        Scalar("eos", 0),
    ),
    constants=("vocab",),
    tunables={"block": (1024, 512, 256), "unroll": (2, 4, 8)},
    default=_sample_defaults,
    launch=lambda dims, tunables, _dtype: Launch(dims["rows"], tunables["block"]),
    flops=lambda dims: 30 * dims["rows"] * dims["vocab"],
    reference=_draw,
    scores=_scores,
    test_dims=(
        *(_sampling(rows, 1000, 50) for rows in range(1, 10)),
        *(_sampling(5, n, 7) for n in (1, 2, 3, 63, 64, 65, 127, 128, 129, 1023, 1024)),
        _sampling(64, 300, 20),
        _sampling(33, 50257, 1024),
        _sampling(64, 50304, 1024),  # padded, as in the engine: vectors of tokens
    ),
    bench_dims=(_sampling(1, 50257, 1024), _sampling(8, 50257, 1024), _sampling(64, 50257, 1024)),
)
