"""Bytes and FLOPs of every step of a forward pass, as a function of shape, batch, context and dtype.

The one place for this arithmetic: statistics, roofline, benchmark and profiler all use it. A step's activations are
counted as if it ran alone, reading its inputs from memory and writing its output there; a fused kernel moves less, and
its caller subtracts what it keeps on the chip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from warpline.config import ACTIVATION_DTYPES, DTYPE_BYTES, KV_DTYPES, WEIGHT_BYTES, ModelConfig
from warpline.model import parameters as p
from warpline.model.parameters import is_quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The cost of one step per forward pass, over all layers."""

    step: p.ModelOp
    calls: int
    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0

    @property
    def bytes(self) -> int:
        """All bytes that the step moves."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A forward pass of `new` tokens per sequence after `past` cached ones.

    Prefill has past=0, a decode step new=1. `logits` is the number of rows per sequence that go through the LM head;
    with `screened` only its codes are read (model/screen.py).
    """

    config: ModelConfig
    dtype: str
    kv_dtype: str | None = None
    batch: int = 1
    new: int = 1
    past: int = 0
    logits: int = 1
    naive: bool = False
    screened: bool = False

    @property
    def pairs(self) -> int:
        """(query, key) pairs that one head of one sequence computes."""
        window = self.config.window or self.past + self.new
        return sum(min(self.past + i + 1, window) for i in range(self.new))

    @property
    def kv_read(self) -> int:
        """Cached positions a layer reads per sequence; those before the first new token's window are never read."""
        window = self.config.window or self.past + self.new
        return min(self.past, window - 1)


def decode(
    config: ModelConfig,
    dtype: str,
    *,
    batch: int = 1,
    context: int = 0,
    screened: bool = False,
    kv_dtype: str | None = None,
) -> Workload:
    """Return the workload of one decode step with `context` positions in the cache."""
    return Workload(config=config, dtype=dtype, kv_dtype=kv_dtype, batch=batch, past=context, screened=screened)


def prefill(config: ModelConfig, dtype: str, *, batch: int = 1, tokens: int, kv_dtype: str | None = None) -> Workload:
    """Return the workload of a prompt of `tokens` tokens."""
    return Workload(config=config, dtype=dtype, kv_dtype=kv_dtype, batch=batch, new=tokens)


def costs(work: Workload) -> list[StepCost]:
    """Return the cost of each step that runs, in order."""
    skipped = (p.FUSED_ATTENTION,) if work.naive else (p.SCORES, p.MASK, p.SOFTMAX, p.VALUES)
    return [_cost(step, work) for step in p.OPS if step not in skipped]


def total_bytes(work: Workload, *, activations: bool = False) -> int:
    """Return the bytes the pass must move: weights once and the KV cache; with `activations` also those."""
    return sum(cost.bytes if activations else cost.weight_bytes + cost.kv_bytes for cost in costs(work))


def total_flops(work: Workload) -> int:
    """Return the floating-point operations of the pass."""
    return sum(cost.flops for cost in costs(work))


def kv_bytes_per_position(config: ModelConfig, dtype: str, kv_dtype: str | None = None) -> int:
    """Return the bytes of one position of one sequence in the KV cache; int8 has codes, and a scale for each head."""
    each = config.n_embd + 4 * config.n_head if kv_dtype == "int8" else config.n_embd * DTYPE_BYTES[KV_DTYPES[dtype]]
    return 2 * config.n_layer * each


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the bytes of all parameters."""
    return sum(_stored(name, shape, dtype) for name, shape in p.shapes(config).items())


def _stored(name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a parameter: in int8 codes and a scale per row for a matrix, float32 for all else."""
    if dtype != "int8":
        return math.prod(shape) * WEIGHT_BYTES[dtype]
    return math.prod(shape) + 4 * shape[0] if is_quantised(name) else 4 * math.prod(shape)


def decode_bytes(
    config: ModelConfig,
    dtype: str,
    *,
    lengths: Sequence[int],
    steps: int,
    screened: bool = False,
    kv_dtype: str | None = None,
) -> int:
    """Return the bytes that `steps` decode steps must move for rows that begin with `lengths` cached positions each."""
    fixed = total_bytes(decode(config, dtype, batch=len(lengths), context=0, screened=screened, kv_dtype=kv_dtype))
    furthest = steps + max(lengths) if config.window is None else config.window - 1
    positions = 0
    for length in lengths:  # the sum of min(length + i, furthest) over the steps i
        growing = min(max(furthest - length, 0), steps)
        positions += growing * length + growing * (growing - 1) // 2 + (steps - growing) * furthest
    return steps * fixed + positions * kv_bytes_per_position(config, dtype, kv_dtype)


def _cost(step: p.ModelOp, work: Workload) -> StepCost:
    config, size = work.config, DTYPE_BYTES[ACTIVATION_DTYPES[work.dtype]]
    layers = config.n_layer if step.scope != "model" else 1
    c, inner, heads = config.n_embd, config.inner, config.n_head
    rows = work.batch * work.new
    head_rows = work.batch * work.logits
    pairs = work.batch * heads * work.pairs
    # The naive form computes every score and masks afterwards.
    scores = work.batch * heads * work.new * (work.past + work.new)

    # step: (elements of activations moved, FLOPs), per layer
    table: dict[p.ModelOp, tuple[int, int]] = {
        p.EMBEDDING: (rows * c, 0),
        p.POSITION: (rows * c, 0),
        p.ADD: (3 * rows * c, rows * c),
        p.LN_1: (2 * rows * c, 8 * rows * c),
        p.QKV_PROJECTION: (4 * rows * c, 2 * rows * c * 3 * c),
        p.QKV_RESHAPE: (6 * rows * c, 0),
        p.KV_CACHE: (2 * rows * c, 0),
        p.SCORES: (2 * rows * c + scores, 2 * scores * config.head_size),
        p.MASK: (2 * scores, scores),
        p.SOFTMAX: (2 * scores, 5 * scores),
        p.VALUES: (scores + 2 * rows * c, 2 * scores * config.head_size),
        p.FUSED_ATTENTION: (4 * rows * c, 4 * pairs * config.head_size + 5 * pairs),
        p.OUTPUT_RESHAPE: (2 * rows * c, 0),
        p.OUTPUT_PROJECTION: (2 * rows * c, 2 * rows * c * c),
        p.RESIDUAL_1: (3 * rows * c, rows * c),
        p.LN_2: (2 * rows * c, 8 * rows * c),
        p.EXPANSION: (rows * (c + inner), 2 * rows * c * inner),
        p.ACTIVATION: (2 * rows * inner, 8 * rows * inner),
        p.PROJECTION: (rows * (inner + c), 2 * rows * inner * c),
        p.RESIDUAL_2: (3 * rows * c, rows * c),
        p.LN_F: (2 * head_rows * c, 8 * head_rows * c),
        p.LM_HEAD: (head_rows * (c + config.vocab_size), 2 * head_rows * c * config.vocab_size),
    }
    elements, flops = table[step]
    return StepCost(
        step=step,
        calls=layers,
        weight_bytes=layers * _weight_bytes(step, work),
        kv_bytes=layers * _kv_bytes(step, work),
        activation_bytes=layers * elements * size,
        flops=layers * flops,
    )


def _weight_bytes(step: p.ModelOp, work: Workload) -> int:
    config = work.config
    if step is p.EMBEDDING or step is p.POSITION:  # one row of the table per token
        return work.batch * work.new * _stored(step.parameters[0], (1, config.n_embd), work.dtype)
    if step is p.LM_HEAD and work.screened and work.dtype != "int8":  # a byte per weight, three numbers per row
        return config.vocab_size * (config.n_embd + 12)
    if step is p.LM_HEAD:  # wte, read again, where the head is tied
        return _stored("lm_head.weight", (config.vocab_size, config.n_embd), work.dtype)
    shapes = p.block_shapes(config) if step.scope != "model" else p.shapes(config)
    return sum(_stored(name, shapes[name], work.dtype) for name in step.parameters)


def _kv_bytes(step: p.ModelOp, work: Workload) -> int:
    """Return the bytes that a step moves in one layer's KV cache."""
    per_position = kv_bytes_per_position(work.config, work.dtype, work.kv_dtype) // work.config.n_layer
    if step is p.KV_CACHE:  # written
        return work.batch * work.new * per_position
    if step is p.FUSED_ATTENTION:  # read; the new tokens' own K and V count as activations
        return work.batch * work.kv_read * per_position
    if step is p.SCORES or step is p.VALUES:
        return work.batch * work.past * per_position // 2
    return 0
