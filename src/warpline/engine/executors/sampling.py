"""From logits to the next token, for executors that sample in torch. No host synchronisation, no shared generator.

What happens to one lane never depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpline.engine.slots import FLAGS, FLOATS, INTEGERS, Record, Slots
from warpline.kernels.noise import gumbel

#: How many of the likeliest tokens a CPU looks at before it sorts them all.
SHORT_LIST = 256


class Records(Record):
    """The records of some slots, a row for each lane, as they were when asked for."""

    def __init__(self, slots: Slots, lanes: Sequence[int], index: Tensor | None = None):
        self.slots, self.needs = slots, slots.needs(lanes)
        self.index = slots.crossing.select(lanes, len(lanes)) if index is None else index
        for names, matrix in ((INTEGERS, slots.integers), (FLOATS, slots.floats), (FLAGS, slots.flags)):
            for name, row in zip(names, matrix[:, self.index], strict=True):
                setattr(self, name, row)


def advance(slots: Slots, lanes: Sequence[int], logits: Tensor, index: Tensor | None = None) -> None:
    """Choose the next token of each lane from `logits` [lanes, V or more] and append it, unless the slot is done.

    `index` is the table lane → slot (`Crossing.select`), if it is at hand: making one may cost a copy.
    """
    rows = Records(slots, lanes, index)
    index, length, done = rows.index, rows.length, rows.done
    # A slot that is done may stand at the last position: it writes back what is there.
    place = length.clamp(max=slots.capacity - 1)
    raw = logits[:, : slots.config.vocab_size].float()
    token = sample(adjust(raw, rows), rows, slots.noise[index, place])
    token = torch.where(done | (length < rows.known), slots.tokens[index, place], token)
    slots.tokens[index, place] = token
    slots.not_finite[index] = rows.not_finite | (~raw.amax(dim=-1).isfinite() & ~done)
    length = length + ~done
    slots.length[index] = length
    if rows.needs.biased:
        lower(slots, rows, token, rows.biased & ~done)
    ended = done | (length >= rows.limit)
    if (eos := slots.config.eos_token_id) is not None:
        ended |= (token == eos) & rows.stops_at_eos
    slots.done[index] = ended
    if rows.needs.logprobs is not None:
        note_logprobs(slots, lanes, raw, done, index)


def lower(slots: Slots, rows: Records, token: Tensor, which: Tensor) -> None:
    """What is added to the logits of these tokens from now on, in lanes of which a text has got one."""
    place = rows.index, token
    had = slots.counts[place]
    lowered = rows.frequency + rows.presence * (had == 0)
    slots.bias[place] = slots.bias[place] - torch.where(which, lowered, 0)
    slots.counts[place] = had + which.int()


def _likeliest(logprob: Tensor, count: int) -> Tensor:
    """The tokens of the largest `count` of each row, of equal ones the first: torch's topk has no order of ties."""
    bits = logprob.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers of the same order
    last = logprob.shape[1] - 1
    keys = ordered << 32 | last - torch.arange(last + 1, device=logprob.device)
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def note_logprobs(
    slots: Slots, lanes: Sequence[int], logits: Tensor, was_done: Tensor, index: Tensor | None = None
) -> None:
    """Note the log-probabilities of a step that has appended its tokens, chosen from `logits` [lanes, V or more, which
    are -inf]; not of slots that were done before it (`was_done` [lanes]). All columns count, because torch's sums
    depend on how a row is aligned, and rows of a padded width are all aligned alike."""
    assert slots.logprob is not None
    assert slots.top_logprob is not None
    assert slots.top_token is not None
    index = slots.crossing.select(lanes, len(lanes)) if index is None else index
    at = index, slots.length[index] - 1
    logprob = logits.float().log_softmax(dim=-1)
    tokens = _likeliest(logprob, slots.top_logprob.shape[-1])
    values = logprob.gather(1, tokens)
    chosen = logprob.gather(1, slots.tokens[at][:, None])[:, 0]
    for buffer, found in ((slots.logprob, chosen), (slots.top_logprob, values), (slots.top_token, tokens)):
        stays = was_done.view(-1, *[1] * (found.dim() - 1))
        buffer[at] = torch.where(stays, buffer[at], found)


def adjust(logits: Tensor, rows: Records) -> Tensor:
    """Penalties, biases, and no end of text before its time. These act on greedy decoding as well."""
    (count, vocab), slots, eos = logits.shape, rows.slots, rows.slots.config.eos_token_id
    if rows.needs.penalty:
        ids = slots.tokens[rows.index]
        ids = ids.where(torch.arange(slots.capacity, device=logits.device) < rows.length[:, None], vocab)
        seen = torch.zeros(count, vocab + 1, dtype=torch.bool, device=logits.device).scatter_(1, ids, True)[:, :vocab]
        penalty = rows.penalty[:, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if rows.needs.biased:
        logits = torch.where(rows.biased[:, None], logits + slots.bias[rows.index], logits)
    if rows.needs.min_length and eos is not None:
        early = (rows.length < rows.min_length) & rows.stops_at_eos
        logits = logits.clone()
        logits[:, eos] = torch.where(early, -torch.inf, logits[:, eos])
    return logits


def sample(logits: Tensor, rows: Records, keys: Tensor) -> Tensor:
    """Greedy lanes take the likeliest token; the others the likeliest after Gumbel noise, which is a fair draw.

    Among the ways to draw, this one is a plain argmax, and it forgives rounding best: a token changes only if the two
    best sums are as close as the rounding error, whereas a cumulative distribution has 50,257 such brinks.
    """
    likeliest = logits.argmax(dim=-1)
    if not rows.needs.random:
        return likeliest
    drawn = rows.temperature > 0
    scaled = truncate(logits / rows.temperature.where(drawn, 1)[:, None], rows)
    return torch.where(drawn, (scaled + gumbel(keys, logits.shape[-1])).argmax(dim=-1), likeliest)


def truncate(scaled: Tensor, rows: Records) -> Tensor:
    """Top-k, top-p and min-p, in this order: what is cut becomes -inf. Equally likely tokens stay or go together."""
    needs = rows.needs
    if needs.candidates:
        # Sorting the whole vocabulary takes a CPU longer than a small model's forward pass, and a few hundred tokens
        # nearly always hold the mass; a GPU sorts quickly but should not be asked whether they did.
        hurried = scaled.device.type == "cpu" and needs.candidates > SHORT_LIST
        for count in (SHORT_LIST, needs.candidates) if hurried else (needs.candidates,):
            lowest, certain = _lowest_kept(scaled, rows, count)
            if count == needs.candidates or bool(certain.all()):
                break
        scaled = scaled.masked_fill(scaled < lowest, -torch.inf)
    if needs.min_p:
        # p ≥ min_p · p_max, in logarithms
        floor = scaled.amax(dim=-1, keepdim=True) + rows.min_p[:, None].log()
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    return scaled


def _lowest_kept(scaled: Tensor, rows: Records, count: int) -> tuple[Tensor, Tensor]:
    """The least likely token that top-k and top-p keep, judged by the `count` likeliest; whether those sufficed."""
    vocab = scaled.shape[-1]
    top_k, top_p = rows.top_k[:, None], rows.top_p[:, None]
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
