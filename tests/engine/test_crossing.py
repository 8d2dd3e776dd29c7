"""Requests into slots and tokens out of them: numpy, torch and our ops' references give the same results."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from warpline.config import ModelConfig, SamplingParams
from warpline.engine.admission import ALL_TOKENS
from warpline.engine.crossing import DONE, FAULT, NOT_FINITE, HostCrossing, KernelCrossing, TorchCrossing
from warpline.engine.request import Request
from warpline.engine.slots import Slots
from warpline.errors import ConfigError

CONFIG = ModelConfig(vocab_size=97, n_positions=64, n_embd=16, n_layer=1, n_head=2)
KINDS = pytest.mark.parametrize("kind", [HostCrossing, TorchCrossing, KernelCrossing])


def make(kind: type, count: int = 6, capacity: int = 65) -> Slots:
    slots = Slots(CONFIG, count, capacity, device=torch.device("cpu"), dtype=torch.float32)
    slots.crossing = kind(slots)
    return slots


def requests(rng: random.Random, count: int) -> list[Request]:
    found = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7]), top_k=rng.choice([0, 3]), top_p=rng.choice([0.5, 1.0]),
            min_p=rng.choice([0, 0.1]), min_tokens=rng.choice([0, 2]), repetition_penalty=rng.choice([1.0, 1.5]),
            ignore_eos=rng.random() < 0.5, presence_penalty=rng.choice([0, 0.5]), frequency_penalty=rng.choice([0, -1]),
            logit_bias={rng.randrange(97): rng.uniform(-9, 9) for _ in range(rng.choice([0, 1, 7]))},
        )  # fmt: skip
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        forced = [rng.randrange(97) for _ in range(rng.randint(0, 30))]
        found.append(Request(prompt, params, rng.randrange(99), i, min(64, len(prompt) + 9), forced))
    return found


@KINDS
def test_a_slot_is_what_its_request_says(kind: type) -> None:
    rng = random.Random(3)
    slots, before = make(kind), {}
    for _ in range(20):
        asked = requests(rng, rng.randint(1, slots.free))
        taken = slots.admit(asked)
        assert len(set(taken)) == len(taken)
        for slot, request in zip(taken, asked, strict=True):
            p, length = request.params, len(request.prompt)
            known = min(length + len(request.forced), request.limit)
            top = p.top_k or ALL_TOKENS
            expected = (length, known, request.limit, length + p.min_tokens, top, length)
            assert slots.integers[:, slot].tolist() == list(expected)
            assert slots.floats[:, slot].tolist() == pytest.approx(
                [p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
            )
            assert slots.flags[:, slot].tolist() == [not p.ignore_eos, p.adjusts_tokens, False, False]
            if p.adjusts_tokens:
                assert slots.bias[slot].tolist() == pytest.approx([dict(p.biases).get(t, 0.0) for t in range(97)])
                assert not slots.counts[slot].any()
                slots.counts[slot] = 3  # as after a run
            assert slots.tokens[slot, :known].tolist() == [*request.prompt, *request.forced][:known]
            before[slot] = slots.integers[:, slot].tolist()
        for slot in before:  # requests admitted earlier are unchanged
            assert slots.integers[:, slot].tolist() == before[slot]
        for slot in rng.sample(list(before), rng.randint(1, len(before))):
            slots.release(slot)
            del before[slot]
    assert slots.done[slots.parking]


def test_all_ways_draw_the_same_noise() -> None:
    asked = [r for r in requests(random.Random(5), 40) if r.params.temperature > 0][:6]
    noise = []
    for kind in (HostCrossing, TorchCrossing, KernelCrossing):
        slots = make(kind)
        taken = slots.admit(asked)
        noise.append([slots.noise[s, : r.limit].tolist() for s, r in zip(taken, asked, strict=True)])
    assert noise[0] == noise[1] == noise[2]
    assert len({tuple(row[:5]) for row in noise[0]}) == len(asked)
    again = make(HostCrossing, count=7)
    again.admit(asked[:1])
    other = again.admit(asked[1:2])[0]  # another slot, other neighbours
    assert again.noise[other, : asked[1].limit].tolist() == noise[0][1]


@KINDS
def test_a_report_says_what_is_new(kind: type) -> None:
    slots = make(kind)
    lanes = slots.admit([Request([1, 2], SamplingParams(), 0, i, 40) for i in range(3)])
    slots.tokens[lanes[0], 2:5] = torch.tensor([7, 8, 9])
    slots.tokens[lanes[2], 2] = 6
    slots.length[lanes[0]], slots.length[lanes[2]] = 5, 3
    slots.done[lanes[2]] = True
    slots.not_finite[lanes[1]] = True
    news = slots.report(lanes, 10).wait()
    assert news.counts.tolist() == [3, 0, 1]
    assert news.flags.tolist() == [0, NOT_FINITE, DONE]
    assert [row[:n].tolist() for row, n in zip(news.tokens, news.counts, strict=True)] == [[7, 8, 9], [], [6]]
    assert slots.report(lanes, 10).wait().counts.tolist() == [0, 0, 0]  # reported once
    slots.length[lanes[0]] = 6
    slots.tokens[lanes[0], 5] = 4
    first, second, third = (slots.report(lanes[:1], 4) for _ in range(3))  # read in any order
    assert third.wait().counts.tolist() == [0]
    assert second.wait().counts.tolist() == [0]
    assert first.wait().tokens[0, 0] == 4
    if kind is not HostCrossing:  # on a CPU no sequence ends itself
        slots.fault.fill_(1)
        assert slots.report(lanes, 4).wait().flags[0] & FAULT


@KINDS
def test_lanes_that_nothing_uses_are_parked(kind: type) -> None:
    crossing = make(kind).crossing
    table = crossing.select([3, 1], 5)
    assert table.tolist() == [3, 1, 6, 6, 6]
    assert crossing.select([2], 5).tolist() == [2, 6, 6, 6, 6]
    assert crossing.select([0, 4, 5], 3).data_ptr() == table.data_ptr()


def test_more_than_fit_or_no_ids_are_refused_and_change_nothing() -> None:
    slots = make(HostCrossing, count=2)
    fine = Request([1], SamplingParams(), 0, 0, 5)
    with pytest.raises(ConfigError, match="3 sequences do not fit into 2"):
        slots.admit([fine] * 3)
    with pytest.raises(ValueError, match="invalid literal"):
        slots.admit([fine, Request(["?"], SamplingParams(), 0, 0, 5)])  # type: ignore[list-item]
    assert slots.free == 2
    assert slots.admit([]) == []
    for _ in range(3):  # always the lowest, in whatever order they are released
        assert slots.admit([fine, fine]) == [0, 1]
        slots.release(0)
        slots.release(1)


def test_a_copy_brings_the_first_positions() -> None:
    slots = make(HostCrossing)
    for cache in (slots.cache.k, slots.cache.v):
        cache.copy_(torch.rand_like(cache))
    before = slots.cache.k.clone()
    slots.copy(2, [0, 5], 7)
    assert torch.equal(slots.cache.k[:, 5, :, :7], before[:, 2, :, :7])
    assert torch.equal(slots.cache.k[:, 5, :, 7:], before[:, 5, :, 7:])
    assert torch.equal(slots.cache.k[:, 1], before[:, 1])
    slots.erase(5)
    assert not slots.cache.v[:, 5].any()


def test_needs_of_several() -> None:
    slots = make(HostCrossing)
    lanes = slots.admit(
        [
            Request([1], SamplingParams(temperature=0, top_p=1.0), 0, 0, 5),
            Request([1], SamplingParams(temperature=1, top_k=4, top_p=1.0), 0, 0, 5),
            Request([1], SamplingParams(temperature=0, top_p=1.0, logprobs=3), 0, 0, 5),
        ]
    )
    assert slots.needs(lanes[:1]).likeliest
    assert not slots.needs(lanes[:1]).filters
    assert slots.needs(lanes[:2]).candidates == 4
    assert slots.needs(lanes).logprobs == 3
    assert not slots.needs(lanes[2:]).likeliest
    assert slots.top_token is not None
    assert slots.top_token.shape == (7, 65, 3)
    assert np.prod(slots.tokens.shape) == 7 * 65
