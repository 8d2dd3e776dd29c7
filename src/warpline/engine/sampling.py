"""From logits to the next token, for executors that sample in torch. No host synchronisation, no shared generator.

What happens to one row never depends on the other rows of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warpline.engine.state import State
from warpline.kernels.noise import gumbel

#: How many of the likeliest tokens a CPU looks at before it sorts them all.
SHORT_LIST = 256


def advance(state: State, logits: Tensor) -> None:
    """Choose each row's next token from `logits` [B, V or more] and append it, unless the row is done."""
    batch = state.batch
    length, done = state.length[:batch], state.done[:batch]
    row = torch.arange(batch, device=logits.device)
    # A done row may stand at the last slot: it writes back what is there.
    slot = length.clamp(max=state.capacity - 1)

    raw = logits[:, : state.config.vocab_size].float()
    token = choose(adjust(raw, state), state, state.noise[row, slot])
    standing = state.tokens[row, slot]
    token = torch.where(done | (length < state.known[:batch]), standing, token)
    state.tokens[row, slot] = token
    state.broken[:batch] |= ~raw.amax(dim=-1).isfinite() & ~done
    if state.needs.logprobs is not None:
        _note_logprobs(state, raw, row, slot, token)

    length += ~done
    eos = state.config.eos_token_id
    if eos is not None:
        done |= (token == eos) & state.stops_at_eos[:batch]
    done |= length >= state.limit[:batch]


def _note_logprobs(state: State, raw: Tensor, row: Tensor, slot: Tensor, token: Tensor) -> None:
    assert state.logprob is not None
    assert state.top_logprob is not None
    assert state.top_token is not None
    done = state.done[: state.batch]
    logprob = raw.log_softmax(dim=-1)
    values, tokens = logprob.topk(state.top_logprob.shape[-1], dim=-1)
    state.logprob[row, slot] = torch.where(done, state.logprob[row, slot], logprob[row, token])
    state.top_logprob[row, slot] = torch.where(done[:, None], state.top_logprob[row, slot], values)
    state.top_token[row, slot] = torch.where(done[:, None], state.top_token[row, slot], tokens)


def adjust(logits: Tensor, state: State) -> Tensor:
    """Repetition penalty, and no end of text before its time. These act on greedy decoding as well."""
    batch, vocab = logits.shape
    length, needs, eos = state.length[:batch], state.needs, state.config.eos_token_id
    if needs.penalty:
        ids = state.tokens[:batch]
        ids = ids.where(torch.arange(state.capacity, device=logits.device) < length[:, None], vocab)
        seen = torch.zeros(batch, vocab + 1, dtype=torch.bool, device=logits.device).scatter_(1, ids, True)[:, :vocab]
        penalty = state.penalty[:batch, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if needs.min_length and eos is not None:
        early = (length < state.min_length[:batch]) & state.stops_at_eos[:batch]
        logits = logits.clone()
        logits[:, eos] = torch.where(early, -torch.inf, logits[:, eos])
    return logits


def choose(logits: Tensor, state: State, keys: Tensor) -> Tensor:
    """Greedy rows take the likeliest token; the others the likeliest after Gumbel noise, which is a fair draw.

    Among the ways to draw, this one is a plain argmax, and it forgives rounding best: a token changes only if the two
    best sums are as close as the rounding error, whereas a cumulative distribution has 50,257 such brinks.
    """
    likeliest = logits.argmax(dim=-1)
    if not state.needs.random:
        return likeliest
    temperature = state.temperature[: len(logits)]
    scaled = truncate(logits / temperature.where(temperature > 0, 1)[:, None], state)
    drawn = (scaled + gumbel(keys, logits.shape[-1])).argmax(dim=-1)
    return torch.where(temperature > 0, drawn, likeliest)


def truncate(scaled: Tensor, state: State) -> Tensor:
    """Top-k, top-p and min-p, in this order: what is cut becomes -inf. Equally likely tokens stay or go together."""
    needs = state.needs
    if needs.candidates:
        # Sorting the whole vocabulary takes a CPU longer than a small model's forward pass, and a few hundred tokens
        # nearly always hold the mass; a GPU sorts quickly but should not be asked whether they did.
        hurried = scaled.device.type == "cpu" and needs.candidates > SHORT_LIST
        for count in (SHORT_LIST, needs.candidates) if hurried else (needs.candidates,):
            lowest, certain = _lowest_kept(scaled, state, count)
            if count == needs.candidates or bool(certain.all()):
                break
        scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
    if needs.min_p:
        # p ≥ min_p · p_max, in logarithms
        floor = scaled.amax(dim=-1, keepdim=True) + state.min_p[: len(scaled), None].log()
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    return scaled


def _lowest_kept(scaled: Tensor, state: State, count: int) -> tuple[Tensor, Tensor]:
    """The least likely token that top-k and top-p keep, judged by the `count` likeliest; whether those sufficed."""
    batch, vocab = scaled.shape
    top_k, top_p = state.top_k[:batch, None], state.top_p[:batch, None]
    ranked = scaled.topk(count, dim=-1).values if count < vocab else scaled.sort(dim=-1, descending=True).values
    kth = torch.where(top_k <= count, ranked.gather(1, top_k.clamp(max=count) - 1), -torch.inf)
    kept = scaled.where(scaled >= kth, -torch.inf)
    probability = (ranked.where(ranked >= kth, -torch.inf) - kept.logsumexp(dim=-1, keepdim=True)).exp()
    mass = probability.cumsum(dim=-1)
    likelier = mass - probability  # mass of the likelier tokens
    nucleus = ranked.where((likelier < top_p) & (ranked >= kth), torch.inf).amin(dim=-1, keepdim=True)
    lowest = torch.where(top_p < 1, nucleus, kth)
    # A top-k beyond the list leaves open what the mass is a share of.
    certain = (top_k <= count) | ((top_k >= vocab) & ((top_p >= 1) | (mass[:, -1:] >= top_p)))
    return lowest, certain
