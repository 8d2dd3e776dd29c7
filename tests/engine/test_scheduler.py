"""Plans of the scheduler: slots, prompts within a budget, and the number of steps."""

from __future__ import annotations

import pytest

from warpline.config import SamplingParams
from warpline.engine.request import Request, Span
from warpline.engine.scheduler import (
    CROWDED_STREAM_STEPS,
    FIRST_STREAM_STEPS,
    STEPS_WHILE_WAITING,
    STREAM_STEPS,
    Prefix,
    Scheduler,
    Sequence,
    Turn,
)


def sequence(prompt: int, new: int, **options: object) -> Sequence:
    return Sequence(Request([1] * prompt, SamplingParams(), 0, 0, prompt + new), **options)  # type: ignore[arg-type]


def scheduler(slots: int = 4, prompt_tokens: int = 100, *, overlaps: bool = False) -> Scheduler:
    return Scheduler(slots, prompt_tokens=prompt_tokens, chunk=32, most_steps=256, crowd=3, overlaps=overlaps)


def played(planner: Scheduler, *, wasteful: bool = False) -> Turn | None:
    """Plan a turn, and end it as if every sequence had got all its tokens."""
    planner.sweep()
    turn = planner.plan(lambda _: wasteful)
    if turn is not None:
        for i, s in enumerate(turn.admitted):
            s.slot = i
        for s in turn.reported:
            s.length = min(s.length + s.ahead, s.request.limit)
            s.ended = s.length == s.request.limit
        turn.landed()
        assert all(s.ahead == 0 for s in turn.reported)
    return turn


def test_nothing_to_do() -> None:
    assert scheduler().plan(lambda _: False) is None


def test_a_long_launch_only_while_nothing_waits() -> None:
    planner = scheduler(slots=2)
    planner.add([sequence(5, 200), sequence(5, 200), sequence(5, 3)])
    turn = played(planner)
    assert turn is not None
    assert (len(turn.admitted), turn.steps) == (2, STEPS_WHILE_WAITING)
    planner.waiting.clear()
    turn = played(planner)
    assert turn is not None
    assert turn.steps == 200 - 1 - STEPS_WHILE_WAITING


@pytest.mark.parametrize(("wasteful", "steps"), [(False, 99), (True, 32)])
def test_steps_that_could_be_wasted_are_taken_in_chunks(wasteful: bool, steps: int) -> None:
    planner = scheduler()
    planner.add([sequence(5, 100)])
    turn = played(planner, wasteful=wasteful)
    assert turn is not None
    assert turn.steps == steps


def test_a_launch_ends_with_the_first_sequence_unless_that_is_near() -> None:
    planner = scheduler()
    planner.add([sequence(5, 100), sequence(5, 60), sequence(5, 4)])
    taken = []
    while (turn := played(planner)) is not None:
        taken.append((len(turn.running), turn.steps))
    assert taken == [(3, STEPS_WHILE_WAITING), (2, 59 - STEPS_WHILE_WAITING), (1, 40)]


def test_a_stream_gets_its_first_token_alone_and_then_growing_chunks() -> None:
    planner = scheduler()
    planner.add([sequence(5, 200, followed=True)])
    taken = [turn.steps for _ in range(5) if (turn := played(planner)) is not None]
    assert taken == [0, FIRST_STREAM_STEPS, STREAM_STEPS, STREAM_STEPS, STREAM_STEPS]


def joined_by_a_stream(*, overlaps: bool) -> tuple[Scheduler, Sequence, Sequence]:
    """Return a running sequence, and a streamed one that has just joined."""
    planner = scheduler(overlaps=overlaps)
    old, new = sequence(5, 200), sequence(5, 200, followed=True)
    planner.add([old])
    played(planner, wasteful=True)
    planner.add([new])
    return planner, old, new


def test_others_wait_a_moment_for_the_first_token_of_a_stream() -> None:
    planner, old, new = joined_by_a_stream(overlaps=False)
    turn = played(planner)
    assert turn is not None
    assert (turn.steps, turn.reported) == (0, [new])
    turn = played(planner)
    assert turn is not None
    assert (turn.steps, turn.reported) == (FIRST_STREAM_STEPS, [old, new])


def test_where_host_and_device_overlap_nobody_waits_for_a_first_token() -> None:
    planner, old, new = joined_by_a_stream(overlaps=True)
    turn = played(planner)
    assert turn is not None
    assert (turn.running, turn.steps) == ([old, new], FIRST_STREAM_STEPS)
    assert turn.parts() == [(0, False), (FIRST_STREAM_STEPS, True)]  # its first token is reported before the steps
    turn = played(planner)
    assert turn is not None
    assert turn.parts() == [(FIRST_STREAM_STEPS, True)]


def test_many_streams_have_longer_turns() -> None:
    planner = scheduler()
    planner.add([sequence(5, 200, followed=True) for _ in range(planner.crowd + 1)])
    taken = [turn.steps for _ in range(3) if (turn := played(planner)) is not None]
    assert taken == [0, FIRST_STREAM_STEPS, CROWDED_STREAM_STEPS]


def test_a_turn_may_be_planned_before_the_last_has_ended() -> None:
    """Tokens in progress count, so that nothing is requested twice or beyond a limit."""
    planner = scheduler()
    one = sequence(5, 8, followed=True)
    planner.add([one])
    turns = []
    while (turn := planner.plan(lambda _: False)) is not None:
        turns.append(turn)
    assert [turn.steps for turn in turns] == [0, 4, 3]
    assert (one.length, one.ahead, one.steps_left) == (5, 8, 0)
    for turn in turns:  # the second sequence ended early
        turn.landed()
    assert (one.ahead, one.steps_left) == (0, 8)


def test_prompts_run_within_a_budget_and_nothing_overtakes() -> None:
    planner = scheduler(slots=4, prompt_tokens=30)
    many = [sequence(n, 5) for n in (20, 25, 4, 70)]
    planner.add(many)
    rows = []
    while (turn := played(planner)) is not None and (turn.first or turn.running):
        rows.append([(many.index(s), start, end) for s, start, end in turn.first])
    assert [parts for parts in rows if parts] == [
        [(0, 0, 20), (1, 0, 10)], [(1, 10, 25), (2, 0, 4), (3, 0, 11)], [(3, 11, 41)], [(3, 41, 70)],
    ]  # fmt: skip
    assert all(s.ended for s in many)


def test_one_token_needs_no_step() -> None:
    planner = scheduler()
    planner.add([sequence(3, 1)])
    turn = played(planner)
    assert turn is not None
    assert (turn.running, turn.steps, len(turn.reported)) == ([], 0, 1)
    assert played(planner) is None


def test_equal_prompts_are_one_span() -> None:
    planner, prefix = scheduler(), Prefix(4, whole=True)
    same = [sequence(5, 9, prefixes=[prefix]) for _ in range(3)]
    planner.add(same)
    turn = played(planner)
    assert turn is not None
    assert turn.spans(turn.first) == [Span(0, 0, 5, (0, 1, 2))]
    assert [(c.source, c.targets, c.length) for c in turn.copies] == [(same[0], same[1:], 5)]
    assert turn.running == same


def test_a_prefix_is_copied_from_a_sequence_that_still_runs() -> None:
    planner, prefix = scheduler(slots=2), Prefix(64, whole=False)
    first, second, third = (sequence(n, new, prefixes=[prefix]) for n, new in ((70, 90), (80, 3), (66, 9)))
    planner.add([first, second, third])
    turn = played(planner)
    assert turn is not None
    assert [(s, start, end) for s, start, end in turn.first] == [(first, 0, 70)]
    assert [(c.source, c.targets, c.length) for c in turn.copies] == [(first, [second], 64)]
    assert turn.second == [(second, 64, 80)]
    turn = played(planner)
    assert turn is not None
    assert (turn.first, turn.second) == ([], [(third, 64, 66)])
    assert turn.copies[0].source is first
    assert prefix.holders == [first, third]


def test_what_needs_a_prefix_waits_for_it() -> None:
    planner, prefix = scheduler(prompt_tokens=40), Prefix(64, whole=False)
    pair = [sequence(70, 9, prefixes=[prefix]) for _ in range(2)]
    planner.add(pair)
    turns = [played(planner) for _ in range(3)]
    assert [len(turn.admitted) for turn in turns if turn is not None] == [1, 1]


def test_what_has_ended_is_swept() -> None:
    planner = scheduler(slots=1)
    running, waiting = sequence(3, 50), sequence(3, 50)
    planner.add([running, waiting])
    played(planner)
    running.ended = waiting.ended = True
    assert planner.sweep() == [running]
    assert planner.plan(lambda _: False) is None
