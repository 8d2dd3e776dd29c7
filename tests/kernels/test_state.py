"""What becomes of slots: requests come, tokens are appended, the host is told; beside a model of it in plain Python."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from warpline.kernels import choices, launch
from warpline.kernels.catalog import CATALOG, find
from warpline.kernels.noise import noise_keys, splitmix
from warpline.kernels.spec import KernelSpec
from warpline.kernels.verify import random_inputs

SLOTS, CAPACITY, WIDTH, EOS, VOCAB = 7, 12, 5, 3, 9
INTEGERS = ("length", "known", "limit", "min_length", "top_k")
FLOATS = ("temperature", "top_p", "min_p", "penalty", "presence", "frequency")
FLAGS = ("stops_at_eos", "biased", "done", "not_finite")


def test_noise_is_splitmix64s() -> None:
    """The first outputs of the generator's author for a state of 0."""
    first = splitmix(np.zeros(1, np.int64)[:, None], np.arange(3)).view(np.uint64)
    assert [f"{word:016x}" for word in first[0]] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]
    assert [f"{word & 0xFFFFFFFF:08x}" for word in noise_keys(np.zeros(1, np.uint64), 3)[0].tolist()] == [
        "7b1dcdaf", "a1b965f4", "8009454f",
    ]  # fmt: skip


def test_noise_of_numpy_and_torch_is_the_same() -> None:
    stream = np.random.default_rng(1).integers(0, 2**64, 20, np.uint64)
    ours = splitmix(torch.from_numpy(stream.view(np.int64))[:, None], torch.arange(50)).to(torch.int32)
    keys = noise_keys(stream, 50)
    assert keys.dtype == np.int32
    assert np.array_equal(ours.numpy(), keys)
    assert len(np.unique(keys)) == keys.size  # 1,000 of 2^32 values rarely meet
    assert np.array_equal(noise_keys(stream[3:4], 10), keys[3:4, :10])  # neither company nor count matters


@pytest.mark.parametrize("spec", CATALOG.values(), ids=CATALOG)
def test_lanes_are_distinct_slots(spec: KernelSpec) -> None:
    at = [i for i, buffer in enumerate(spec.inputs) if buffer.name == "lanes"]
    for dims in spec.test_dims if at else ():
        lanes = [lane for lane in random_inputs(spec, spec.dtypes[0], dims, 1, "cpu")[at[0]].tolist() if lane >= 0]
        assert len(set(lanes)) == len(lanes)
        assert max(lanes, default=0) < dims["slots"]


@dataclasses.dataclass
class Slot:
    """One slot, in plain Python."""

    integers: list[int]
    floats: list[float]
    stops: bool
    stream: int
    tokens: list[int]
    biases: dict[int, float] | None  # None: its tables are not used
    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    done: bool = False
    not_finite: bool = False
    reported: int = 0


def empty_state() -> dict[str, Tensor]:
    """Full of what was there before."""
    integers = {name: torch.full((SLOTS,), 99) for name in (*INTEGERS, "reported")}
    floats = {name: torch.full((SLOTS,), 9.0) for name in FLOATS}
    flags = {name: torch.ones(SLOTS, dtype=torch.bool) for name in FLAGS}
    tokens = {"tokens": torch.full((SLOTS, CAPACITY), 7), "noise": torch.zeros(SLOTS, CAPACITY, dtype=torch.int32)}
    counts = torch.full((SLOTS, VOCAB), 55, dtype=torch.int32)
    return {**integers, **floats, **flags, **tokens, "bias": torch.full((SLOTS, VOCAB), 5.0), "counts": counts}


def call(state: dict[str, Tensor], name: str, given: dict[str, Tensor], **floats: int) -> dict[str, Tensor]:
    """Run an op's reference on what is given and on the state, which it changes; returns what it leaves."""
    spec = find(name)
    inputs = [{**state, **given}[buffer.name] for buffer in spec.inputs]
    spec.dims_of([tensor.shape for tensor in inputs])
    results = dict(zip((b.name for b in spec.results), spec.reference(*inputs, **floats), strict=True))
    for buffer in spec.results:
        assert results[buffer.name].dtype == launch.TORCH_TYPES[buffer.element("fp32")], buffer.name
    state.update({name: tensor for name, tensor in results.items() if name in state})
    return results


def request(rng: random.Random) -> Slot:
    length = rng.randint(1, 4)
    known = rng.randint(length, WIDTH)
    integers = [length, known, rng.randint(known + 1, CAPACITY), rng.randint(1, 9), rng.randint(1, 50)]
    floats = [rng.random() for _ in FLOATS]
    biases = {token: rng.random() for token in rng.sample(range(VOCAB), rng.randint(0, 4))}
    tokens = [rng.randrange(VOCAB) for _ in range(known)]
    used = biases if rng.random() < 0.5 else None
    return Slot(integers, floats, rng.random() < 0.7, rng.getrandbits(64), tokens, used)


def admit(state: dict[str, Tensor], lanes: Tensor, made: list[Slot]) -> None:
    streams = np.array([slot.stream for slot in made], np.uint64).view(np.int64)
    lengths = [len(slot.tokens) for slot in made]
    begins = [sum(lengths[:i]) for i in range(len(made))]
    biases = [list((slot.biases or {}).items()) for slot in made]
    places = [(sum(map(len, biases[:i])), len(its)) for i, its in enumerate(biases)]
    given = {
        "integers": torch.tensor(
            [[*s.integers, begin, *place] for s, begin, place in zip(made, begins, places, strict=True)]
        ),
        "floats": torch.tensor([slot.floats for slot in made]),
        "flags": torch.tensor([[slot.stops, slot.biases is not None] for slot in made]),
        "biased_tokens": torch.tensor([token for its in biases for token, _ in its], dtype=torch.int32),
        "biases": torch.tensor([bias for its in biases for _, bias in its]),
        "stream": torch.from_numpy(streams),
        "given": torch.tensor([token for slot in made for token in slot.tokens], dtype=torch.int32),
    }
    call(state, "admit", {"lanes": lanes, **given})


def test_slots_beside_a_model_of_them() -> None:
    rng = random.Random(4)
    for _ in range(10):
        state, slots = empty_state(), dict[int, Slot]()
        for turn in range(8):
            free = [slot for slot in range(SLOTS) if slot not in slots or slots[slot].done]
            new = rng.sample(free, min(len(free), rng.randint(0, 3)))
            if new:
                made = [request(rng) for _ in new]
                admit(state, torch.tensor(new), made)
                slots |= dict(zip(new, made, strict=True))
                for one in made:
                    one.reported = one.integers[0]
            if slots:
                step(state, slots, rng)
                tell(state, slots, rng, fault=turn == 5)
        for at, slot in slots.items():
            compare(state, at, slot)


def step(state: dict[str, Tensor], slots: dict[int, Slot], rng: random.Random) -> None:
    lanes = rng.sample(sorted(slots), rng.randint(1, len(slots)))
    token = [rng.randrange(VOCAB) for _ in lanes]
    logit = [rng.choice([1.0, 1.0, 1.0, float("nan")]) for _ in lanes]
    given = {"token": torch.tensor(token), "logit": torch.tensor(logit), "lanes": torch.tensor(lanes)}
    call(state, "append_token", given, eos=EOS)
    for lane, drawn, score in zip(lanes, token, logit, strict=True):
        slot = slots[lane]
        if slot.done:
            continue
        length, known, limit = slot.integers[:3]
        if length >= known:
            slot.tokens.append(drawn)
        slot.integers[0] = length + 1
        taken = slot.tokens[length]
        if slot.biases is not None:
            presence, frequency = slot.floats[4:]
            slot.biases[taken] = slot.biases.get(taken, 0.0) - frequency - presence * (taken not in slot.counts)
        slot.counts[taken] = slot.counts.get(taken, 0) + 1
        slot.not_finite |= score != score
        slot.done = (slot.tokens[length] == EOS and slot.stops) or length + 1 >= limit


def tell(state: dict[str, Tensor], slots: dict[int, Slot], rng: random.Random, *, fault: bool) -> None:
    lanes, width = rng.sample([*sorted(slots), -1], rng.randint(1, len(slots))), rng.randint(2, 5)
    given = {"fault": torch.tensor([int(fault)], dtype=torch.int32), "lanes": torch.tensor(lanes)}
    news = call(state, "report", {**given, "news": torch.full((len(lanes), width), -1, dtype=torch.int32)})["news"]
    for lane, row in zip(lanes, news.tolist(), strict=True):
        if lane < 0:
            assert row == [-1] * width
            continue
        slot = slots[lane]
        new = slot.tokens[slot.reported : slot.integers[0]][: width - 2]
        assert row == [len(new), slot.done + 2 * slot.not_finite + 4 * fault, *new, *[-1] * (width - 2 - len(new))]
        slot.reported += len(new)


def compare(state: dict[str, Tensor], at: int, slot: Slot) -> None:
    def held(names: tuple[str, ...]) -> list[Any]:
        return [state[name][at].item() for name in names]

    assert held(INTEGERS) == slot.integers
    assert held(FLOATS) == pytest.approx(slot.floats)
    assert held(("stops_at_eos", "done", "not_finite", "reported")) == [
        slot.stops,
        slot.done,
        slot.not_finite,
        slot.reported,
    ]
    assert state["tokens"][at, : len(slot.tokens)].tolist() == slot.tokens
    assert state["biased"][at].item() == (slot.biases is not None)
    if slot.biases is not None:
        expected = [slot.biases.get(token, 0.0) for token in range(VOCAB)]
        assert state["bias"][at].tolist() == pytest.approx(expected, abs=1e-6)  # of floats below 10, in float32
        assert state["counts"][at].tolist() == [slot.counts.get(token, 0) for token in range(VOCAB)]
    assert np.array_equal(state["noise"][at : at + 1].numpy(), noise_keys(np.array([slot.stream], np.uint64), CAPACITY))


def test_slots_of_no_lane_stay_as_they_are() -> None:
    for name in ("append_token", "admit", "report"):
        spec = find(name)
        inputs = random_inputs(spec, "fp32", spec.test_dims[3], 6, "cpu")
        named = dict(zip((buffer.name for buffer in spec.inputs), inputs, strict=True))
        results = spec.reference(*inputs, **spec.number_values(spec.test_dims[3]))
        others = torch.ones(spec.test_dims[3]["slots"], dtype=torch.bool)
        others[named["lanes"][named["lanes"] >= 0]] = False
        for buffer, result in zip(spec.results, results, strict=True):
            if buffer.dims[0] == "slots":
                assert torch.equal(result[others], named[buffer.name][others])


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "Tesla T4"])
def test_what_is_shipped_for_older_code_is_left_aside(gpu: str) -> None:
    """Names of dimensions may have changed since; a lookup still works."""
    for spec in CATALOG.values():
        for dims in spec.bench_dims:
            found = choices.stored(spec, spec.dtypes[0], dims, gpu)
            assert found is None or choices.fits(spec, spec.dtypes[0], dims, found)


def test_a_plan_takes_what_is_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, dims = find("prompt_attention"), {"heads": 12, "rows": 1024, "depth": 64}
    other = {**spec.default(dims, "fp16", "sm_90"), "tile_queries": 128}
    monkeypatch.setattr(launch, "arch_of", lambda _device: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Imaginary 1")
    assert launch.tunables_of(spec, "fp16", dims, 0) == spec.default(dims, "fp16", "sm_90")
    monkeypatch.setattr(choices, "stored", lambda *_: other)
    assert launch.tunables_of(spec, "fp16", dims, 0) == launch.tunables_of(spec, "fp16", dims, 0, "sm_90") == other
    assert launch.tunables_of(spec, "fp16", dims, 0, "compute_75") == spec.default(dims, "fp16", "compute_75")
