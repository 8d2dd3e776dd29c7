"""Chooses tokens from logits, for executors that sample in torch. No host synchronisation, no shared generator.

The result of one lane never depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpline.engine.slots import FLAGS, FLOATS, INTEGERS, Record, Slots
from warpline.kernels.noise import gumbel

#: Number of the likeliest tokens that a CPU ranks before it sorts the whole vocabulary.
SHORT_LIST = 256


class Records(Record):
    """A copy of the records of some slots, one row per lane."""

    def __init__(self, slots: Slots, lanes: Sequence[int], index: Tensor | None = None):
        self.slots, self.needs = slots, slots.needs(lanes)
        self.index = slots.crossing.select(lanes, len(lanes)) if index is None else index
        for names, matrix in ((INTEGERS, slots.integers), (FLOATS, slots.floats), (FLAGS, slots.flags)):
            for name, row in zip(names, matrix[:, self.index], strict=True):
                setattr(self, name, row)


def advance(slots: Slots, lanes: Sequence[int], logits: Tensor, index: Tensor | None = None) -> None:
    """Choose the next token of each lane from `logits` [lanes, V or more] and append it, unless the slot is done.

    `index` is the table lane → slot (`Crossing.select`), if the caller has it: making one may cost a copy.
    """
    rows = Records(slots, lanes, index)
    index, length, done = rows.index, rows.length, rows.done
    # A done slot may be at the last position: it writes back the token that is there.
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
    """Lower the bias of the appended tokens, for lanes where `which` is true."""
    place = rows.index, token
    had = slots.counts[place]
    lowered = rows.frequency + rows.presence * (had == 0)
    slots.bias[place] = slots.bias[place] - torch.where(which, lowered, 0)
    slots.counts[place] = had + which.int()


def _likeliest(logprob: Tensor, count: int) -> Tensor:
    """Return the `count` likeliest tokens of each row, of equal ones the first; torch's topk does not order ties."""
    bits = logprob.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers of the same order
    last = logprob.shape[1] - 1
    keys = ordered << 32 | last - torch.arange(last + 1, device=logprob.device)
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def note_logprobs(
    slots: Slots, lanes: Sequence[int], logits: Tensor, was_done: Tensor, index: Tensor | None = None
) -> None:
    """Store the log-probabilities of a step that has appended its tokens, chosen from `logits` [lanes, V or more];
    columns beyond V are -inf. Slots that were done before the step (`was_done` [lanes]) keep theirs. All columns take
    part, because torch's sums depend on the alignment of a row, and rows of a padded width are all aligned alike."""
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
    """Apply penalties and biases, and exclude the end of text before `min_length`. Greedy lanes are included."""
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
    """Return the likeliest token of greedy lanes, and of the others the likeliest after Gumbel noise, which is a random
    draw.

    This draw is a plain argmax, and it tolerates rounding best: a token changes only if the two best sums are as close
    as the rounding error, whereas a cumulative distribution has 50,257 such borders.
    """
    likeliest = logits.argmax(dim=-1)
    if not rows.needs.random:
        return likeliest
    drawn = rows.temperature > 0
    scaled = truncate(logits / rows.temperature.where(drawn, 1)[:, None], rows)
    return torch.where(drawn, (scaled + gumbel(keys, logits.shape[-1])).argmax(dim=-1), likeliest)


def truncate(scaled: Tensor, rows: Records) -> Tensor:
    """Apply top-k, top-p and min-p, in this order: excluded tokens become -inf. Equally likely tokens stay or go
    together."""
    needs = rows.needs
    if needs.candidates:
        # Sorting the vocabulary takes a CPU longer than the forward pass of a small model, and a few hundred tokens
        # usually hold the mass. A GPU sorts fast, and a check whether they did would synchronise.
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
    """Return the score of the least likely token that top-k and top-p keep, judged by the `count` likeliest tokens, and
    whether these sufficed."""
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
    # With top-k beyond the list, the total mass is unknown.
    certain = (top_k <= count) | ((top_k >= vocab) & ((top_p >= 1) | (mass[:, -1:] >= top_p)))
    return lowest, certain
