"""Many tokens in one call: every thread of a team runs this function, and they meet at barriers.

Each output of a product is one thread's, summed in one order, so results do not depend on who was faster, nor on how
many threads there are. LayerNorm is done by every thread for itself, which saves a barrier.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from warpline.kernels.cpu.arithmetic import ADDED, STORED, dot, exp, multiply, normalise
from warpline.kernels.cpu.choose import choose
from warpline.kernels.cpu.intrinsics import Number, load, meet, pointer, store

#: The numbers that a call is given, in order.
SIZES = (
    "width", "inner", "layers", "heads", "vocab", "batch", "window", "eos", "activation", "chooses",
)  # fmt: skip
#: The matrices of a layer, in the order of their addresses; behind all layers come the token embedding and the head.
MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
#: The vectors of a layer, one behind the other.
VECTORS = (
    "ln_1.weight", "ln_1.bias", "attn.c_attn.bias", "attn.c_proj.bias",
    "ln_2.weight", "ln_2.bias", "mlp.c_fc.bias", "mlp.c_proj.bias",
)  # fmt: skip


@njit(cache=True, fastmath=True, error_model="numpy")
def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    last: int,
    scale: Number,
    scores: np.ndarray,
    y: np.ndarray,
) -> None:
    """One head of one sequence: its query over the slots from `first` to `last`."""
    depth = len(q)
    top = np.float32(-3e38)
    for t in range(first, last):
        scores[t] = dot(keys[t], q, depth) * scale
        top = max(top, scores[t])
    total = np.float32(0)
    for t in range(first, last):
        scores[t] = exp(scores[t] - top)
        total += scores[t]
    for d in range(depth):
        y[d] = np.float32(0)
    for t in range(first, last):
        weight, row = scores[t] / total, values[t]
        for d in range(depth):
            y[d] += weight * load(row[d])


@njit(cache=True, error_model="numpy")
def append(
    row: int, chosen: int, finite: bool, tokens: np.ndarray, length: np.ndarray, known: np.ndarray, limit: np.ndarray,
    stops: np.ndarray, done: np.ndarray, broken: np.ndarray, eos: int,
) -> None:  # fmt: skip
    """The end of a row's step, as `State` describes it."""
    at = length[row]
    if at >= known[row]:
        tokens[row, at] = chosen
    length[row] = at + 1
    if not finite:
        broken[row] = True
    if (tokens[row, at] == eos and stops[row]) or at + 1 >= limit[row]:
        done[row] = True


@njit(cache=True, nogil=True, error_model="numpy")
def decode(
    me: int, team: int, gate: np.ndarray, turn: int, steps: int,
    sizes: np.ndarray, epsilon: Number, scales_of_layers: np.ndarray,
    matrices: np.ndarray, scales: np.ndarray, kind: np.ndarray, vectors: np.ndarray, places: np.ndarray,
    k: np.ndarray, v: np.ndarray,
    tokens: np.ndarray, length: np.ndarray, known: np.ndarray, limit: np.ndarray, least: np.ndarray,
    temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, penalty: np.ndarray,
    noise: np.ndarray, stops: np.ndarray, done: np.ndarray, broken: np.ndarray,
    x: np.ndarray, qkv: np.ndarray, heads_out: np.ndarray, hidden: np.ndarray, logits: np.ndarray, noisy: np.ndarray,
    seen: np.ndarray,
) -> int:  # fmt: skip
    """Up to `steps` steps of the rows that are not done, ending with logits alone where `chooses` is 0. Every thread of
    the team calls it with its own number; returns the turn that the gate has come to."""
    width, inner, layers, heads, vocab, batch = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    window, eos, activation, chooses = sizes[6], sizes[7], sizes[8], sizes[9]
    depth = width // heads
    normal = np.empty((batch, width), np.float32)
    row = np.empty(max(width, inner), np.float32)
    scores = np.empty(k.shape[3], np.float32)
    single = places[0]
    none = np.zeros(vocab, np.float32)
    embedding = carray(pointer(matrices[4 * layers], kind), (vocab * width,))
    for _ in range(steps):
        going = False
        for b in range(batch):
            going |= not done[b]
        turn = meet(gate, turn, team)  # everybody has seen who goes on
        if not going:
            break
        for b in range(me, batch, team):
            position = length[b] - 1
            token = tokens[b, position]
            scale = np.float32(1)
            if scales[4 * layers] != 0:
                scale = carray(pointer(scales[4 * layers], single), (vocab,))[token]
            here = embedding[token * width : token * width + width]
            for i in range(width):
                x[b, i] = load(here[i]) * scale + places[position, i]
        turn = meet(gate, turn, team)
        for layer in range(layers):
            of, at = 4 * layer, vectors[layer]
            b1 = 2 * width  # where biases begin, in the order of VECTORS
            b2 = b1 + 3 * width
            n2 = b2 + width
            b3 = n2 + 2 * width
            b4 = b3 + inner
            for b in range(batch):
                normalise(x[b], at[:width], at[width:b1], epsilon, normal[b])
            multiply(matrices[of], scales[of], kind, single, at[b1:b2], normal, qkv,
                     3 * width * me // team, 3 * width * (me + 1) // team, STORED, row)  # fmt: skip
            turn = meet(gate, turn, team)
            for item in range(me, batch * heads, team):
                b, head = item // heads, item % heads
                position, column = length[b] - 1, head * depth
                keys, values = k[layer, b, head], v[layer, b, head]
                for d in range(depth):
                    store(keys[position], d, qkv[b, width + column + d])
                    store(values[position], d, qkv[b, 2 * width + column + d])
                first = max(0, position + 1 - window) if window > 0 else 0
                attend(qkv[b, column : column + depth], keys, values, first, position + 1, scales_of_layers[layer],
                       scores, heads_out[b, column : column + depth])  # fmt: skip
            turn = meet(gate, turn, team)
            multiply(matrices[of + 1], scales[of + 1], kind, single, at[b2:n2], heads_out, x,
                     width * me // team, width * (me + 1) // team, ADDED, row)  # fmt: skip
            turn = meet(gate, turn, team)
            for b in range(batch):
                normalise(x[b], at[n2 : n2 + width], at[n2 + width : b3], epsilon, normal[b])
            multiply(matrices[of + 2], scales[of + 2], kind, single, at[b3:b4], normal, hidden,
                     inner * me // team, inner * (me + 1) // team, activation, row)  # fmt: skip
            turn = meet(gate, turn, team)
            multiply(matrices[of + 3], scales[of + 3], kind, single, at[b4 : b4 + width], hidden, x,
                     width * me // team, width * (me + 1) // team, ADDED, row)  # fmt: skip
            turn = meet(gate, turn, team)
        last = vectors[layers]
        for b in range(batch):
            normalise(x[b], last[:width], last[width : 2 * width], epsilon, normal[b])
        multiply(matrices[4 * layers + 1], scales[4 * layers + 1], kind, single, none, normal, logits,
                 vocab * me // team, vocab * (me + 1) // team, STORED, row)  # fmt: skip
        turn = meet(gate, turn, team)
        if chooses == 0:
            continue
        for b in range(me, batch, team):
            if done[b]:
                continue
            finite = True
            for i in range(vocab):
                finite &= np.isfinite(logits[b, i])
            banned = eos if stops[b] and length[b] < least[b] else -1
            key = noise[b, min(length[b], noise.shape[1] - 1)]
            token = choose(logits[b], noisy[b], tokens[b, : length[b]], seen[b], banned,
                           temperature[b], top_k[b], top_p[b], min_p[b], penalty[b], key)  # fmt: skip
            append(b, token, finite, tokens, length, known, limit, stops, done, broken, eos)
        turn = meet(gate, turn, team)
    return turn
