"""The simulator: its arithmetic on loads that can be computed by hand, and properties of any load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpline import LLM
from warpline.errors import ConfigError
from warpline.scale.simulate import Asked, poisson, replicas_for, simulate
from warpline.scale.times import Times, between, measured

#: A step takes 10 ms in any case, a prompt 100 ms for each hundred tokens.
TIMES = Times(steps=((1, 0.01), (32, 0.01)), position=0.0, prompts=((1, 0.001), (1000, 1.0)), slots=4, halts=False)


def test_one_request_by_hand() -> None:
    """A prompt of 100 tokens, with its first token reported at once; then launches of 4, 8 and 3 steps."""
    (one,) = simulate(TIMES, [Asked(0.0, 100, 16)]).answers
    assert one.ttft == pytest.approx(0.1)
    assert one.ended == pytest.approx(0.1 + 0.15)
    assert one.tpot == pytest.approx(0.15 / 15)


def test_a_request_costs_its_way_there_and_back() -> None:
    from dataclasses import replace

    (one,) = simulate(replace(TIMES, request=0.02, turn=0.001), [Asked(1.0, 100, 2)]).answers
    assert one.sent == 1.0
    assert one.ttft == pytest.approx(0.02 + 0.001 + 0.1)


def test_a_newcomer_ends_the_launch_behind_its_step() -> None:
    from dataclasses import replace

    load = [Asked(0.0, 100, 200), Asked(0.253, 100, 1)]
    late = simulate(TIMES, load).answers[1]
    soon = simulate(replace(TIMES, halts=True), load).answers[1]
    # The first has its prompt until 0.1, launches of 4 and 8 steps until 0.22, the next until 0.30.
    assert late.sent + (late.ttft or 0) == pytest.approx(0.30 + 0.1)
    assert soon.sent + (soon.ttft or 0) == pytest.approx(0.26 + 0.1)


def test_a_first_token_is_told_before_the_steps_of_its_turn() -> None:
    """Where host and device overlap."""
    from dataclasses import replace

    load = [Asked(0.0, 100, 200), Asked(0.253, 100, 2)]
    one = simulate(replace(TIMES, overlaps=True), load).answers[1]
    assert one.first == pytest.approx(0.30 + 0.1)
    assert one.ended == pytest.approx(0.30 + 0.1 + 0.04)


def test_twice_the_replicas_twice_the_throughput() -> None:
    load = [Asked(0.0, 10, 64)] * 64
    one, two = simulate(TIMES, load, concurrency=4), simulate(TIMES, load, replicas=2, concurrency=8)
    assert two.throughput == pytest.approx(2 * one.throughput, rel=0.02)
    assert all(share > 0.95 for share in two.busy)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 6),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_every_request_is_answered_or_refused(
    load: list[tuple[float, int, int]], replicas: int, queue: int, halts: bool, concurrency: int | None
) -> None:
    from dataclasses import replace

    times = replace(TIMES, halts=halts, prompt_tokens=128, turn=0.0005)
    asked = sorted(Asked(*one) for one in load)
    found = simulate(times, asked, replicas=replicas, queue=queue, concurrency=concurrency)
    assert len(found.answers) == len(asked)
    for one in found.answers:
        assert one.refused == (one.ended is None)
        if not one.refused:
            least = times.prompt(one.asked.prompt) if one.asked.prompt <= 128 else 0.0
            assert one.ttft is not None
            assert one.ttft >= least - 1e-9
            assert one.ended is not None
            assert one.first is not None
            assert one.ended >= one.first
    if concurrency is None and queue == 0 and len(asked) <= 4:
        assert not found.refused


def test_goodput_and_the_replicas_for_a_load() -> None:
    load = poisson(30.0, 400, 50, 16, spread=0.5, seed=3)
    assert load == poisson(30.0, 400, 50, 16, spread=0.5, seed=3)
    slow, fast = simulate(TIMES, load), simulate(TIMES, load, replicas=4)
    assert slow.percentile("ttft", 99) > fast.percentile("ttft", 99)
    assert slow.goodput(0.3, 0.05) < fast.goodput(0.3, 0.05) <= 400 / fast.duration
    count = replicas_for(TIMES, load, ttft=0.5, tpot=0.05)
    assert simulate(TIMES, load, replicas=count).percentile("ttft", 99) <= 0.5
    assert simulate(TIMES, load, replicas=count - 1).percentile("ttft", 99) > 0.5
    with pytest.raises(ConfigError, match="not even"):
        replicas_for(TIMES, load[:2], ttft=1e-6, tpot=1.0)
    with pytest.raises(ConfigError, match="at least one"):
        simulate(TIMES, [])
    with pytest.raises(ConfigError, match="a rate above 0"):
        poisson(0, 1, 1, 1)


def test_times_are_on_straight_lines_and_survive_json() -> None:
    assert between(((1, 1.0), (3, 2.0)), 2) == 1.5
    assert between(((1, 1.0), (3, 2.0)), 5) == 3.0
    assert between(((4, 1.0),), 9) == 1.0
    assert Times.of(TIMES.row() | {"kind": "times"}) == TIMES
    assert TIMES.step(2, 100) == pytest.approx(0.01)


def test_a_model_is_measured() -> None:
    llm = LLM("random:n_layer=2,n_head=2,n_embd=32,n_positions=64", device="cpu", dtype="fp32", threads=1, max_batch=4)
    found = measured(llm)
    assert [lanes for lanes, _ in found.steps] == [1, 2, 4]
    assert [tokens for tokens, _ in found.prompts] == [8, 32, 128]
    assert all(seconds > 0 for _, seconds in (*found.steps, *found.prompts))
    assert (found.slots, found.halts) == (4, True)
