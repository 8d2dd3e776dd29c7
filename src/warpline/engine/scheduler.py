"""Decides which sequences run in the next engine turn, which prompts, and for how many steps. Imports no torch.

A slot has room for prompt and limit of the sequence admitted to it, so a running sequence is never preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from warpline.engine.request import Request, Span

#: Steps of a launch while a sequence waits for a slot, or for its prompt to be run.
STEPS_WHILE_WAITING = 16
#: An engine turn of many tokens also reports so many steps before its end: the host makes text of the first part while
#: the device computes the rest.
LAST_STEPS, MANY_TOKENS = 16, 2048
#: Steps of a launch that serves streams: few after a first token, else by the number of sequences. Each launch brings
#: something for every stream, and a new request waits for what is enqueued.
FIRST_STREAM_STEPS, STREAM_STEPS, CROWDED_STREAM_STEPS = 4, 8, 16


@dataclass(eq=False, slots=True)
class Prefix:
    """Tokens with which several prompts begin; run once, then copied from slot to slot."""

    length: int
    whole: bool  # whether only the last token follows, which is equal too
    holders: list[Sequence] = field(default_factory=list)  # running sequences that have it in their cache


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and what the host knows of its progress."""

    request: Request
    prefixes: list[Prefix] = field(default_factory=list)  # of its prompt, the longest first
    followed: bool = False  # whether a reader wants the tokens as they come
    slot: int = -1  # where it runs
    filled: int = 0  # positions of its prompt that are in the cache, or will be before anything reads them
    ahead: int = 0  # most tokens that launches in flight bring
    chunks: int = 0  # launches that brought tokens
    ended: bool = False  # no more launches: done, stopped or cancelled
    prompt_length: int = field(init=False)
    length: int = field(init=False)  # prompt and tokens known to the host

    def __post_init__(self) -> None:
        self.prompt_length = self.length = len(self.request.prompt)

    @property
    def steps_left(self) -> int:
        """Tokens until its limit that no launch in flight covers."""
        return self.request.limit - self.length - self.ahead


#: A sequence, and start and end of the positions of its prompt to run.
Part = tuple[Sequence, int, int]


@dataclass(slots=True)
class Copy:
    """Positions 0 … length - 1 of a slot's cache, to be copied to other slots."""

    source: Sequence
    targets: list[Sequence]
    length: int


@dataclass(slots=True)
class Turn:
    """One engine turn: admit; run the first spans, copy, run the second spans, copy again; then decode."""

    admitted: list[Sequence] = field(default_factory=list)
    first: list[Part] = field(default_factory=list)  # sequence, start, end
    copies: list[Copy] = field(default_factory=list)
    second: list[Part] = field(default_factory=list)
    late: list[Copy] = field(default_factory=list)
    twins: dict[int, list[Sequence]] = field(default_factory=dict)  # by sequence id: those with an equal prompt
    begun: list[Sequence] = field(default_factory=list)  # those whose prompt ends, which brings a first token
    running: list[Sequence] = field(default_factory=list)  # those that decode
    reported: list[Sequence] = field(default_factory=list)  # those that get tokens
    steps: int = 0

    def spans(self, parts: list[Part]) -> list[Span]:
        """Return the spans for the executor. Requires: every sequence has a slot."""
        return [Span(s.slot, start, end, self._ending(s) if end == s.prompt_length else ()) for s, start, end in parts]

    def _ending(self, sequence: Sequence) -> tuple[int, ...]:
        if not self.twins:
            return (sequence.slot,)
        return (sequence.slot, *[twin.slot for twin in self.twins.get(id(sequence), ())])

    def parts(self) -> list[tuple[int, bool]]:
        """Return the steps before each report, and whether it is the last. A first token that a reader waits for has
        its own report."""
        if self.steps and any(s.followed for s in self.begun):
            return [(0, False), (self.steps, True)]
        if self.steps > 2 * LAST_STEPS and self.steps * len(self.running) >= MANY_TOKENS:
            return [(self.steps - LAST_STEPS, False), (LAST_STEPS, True)]
        return [(self.steps, True)]

    @property
    def followed(self) -> bool:
        """Whether a reader wants some of its tokens as they come."""
        return any(s.followed for s in self.reported)

    def begin(self) -> None:
        """Note the sequences whose prompt ends in this turn: each gets a token. Requires: all prompts are planned."""
        self.begun = [s for s, _, end in (*self.first, *self.second) if end == s.prompt_length]
        self.begun += [t for twins in self.twins.values() for t in twins]
        for sequence in self.begun:
            sequence.ahead += 1

    def decode(self, running: list[Sequence], steps: int) -> None:
        """Add `steps` steps of these sequences; the turn is complete then."""
        self.running, self.steps = running, steps
        for sequence in running:
            sequence.ahead += steps
        self.reported = list(dict.fromkeys([*running, *self.begun])) if self.begun else running
        for sequence in self.reported:
            sequence.chunks += 1

    def landed(self) -> None:
        """Note that the host knows the turn's tokens."""
        for sequence in self.begun:
            sequence.ahead -= 1
        for sequence in self.running:
            sequence.ahead -= self.steps


class Scheduler:
    """Keeps waiting and running sequences and plans turns. `overlaps`: the device computes while the host publishes;
    then running sequences go on in a turn that brings others their first tokens."""

    def __init__(
        self, slots: int, *, prompt_tokens: int, chunk: int, most_steps: int, crowd: int, overlaps: bool = False
    ):
        self.slots, self.prompt_tokens, self.chunk, self.most_steps = slots, prompt_tokens, chunk, most_steps
        self.crowd, self.overlaps = crowd, overlaps
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Append sequences to the queue."""
        self.waiting.extend(sequences)

    def sweep(self) -> list[Sequence]:
        """Forget sequences that have ended, and return those that had a slot, which the caller releases."""
        if any(s.ended for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if not s.ended)
        gone = [s for s in self.running if s.ended]
        if gone:
            self.running = [s for s in self.running if not s.ended]
        for sequence in gone:
            for prefix in sequence.prefixes:
                if sequence in prefix.holders:
                    prefix.holders.remove(sequence)
        return gone

    def plan(self, wasteful: Callable[[list[Sequence]], bool]) -> Turn | None:
        """Return the next turn, or None if there is nothing to do. `wasteful` says whether some of these sequences may
        end unnoticed by the launch, so that steps would be wasted. Requires: `sweep` was called."""
        turn, budget = Turn(), self.prompt_tokens
        for sequence in self.running:
            if sequence.filled < sequence.prompt_length and budget > 0:
                budget -= self._run_prompt(turn.first, sequence, budget)
        while self.waiting and len(self.running) < self.slots and budget > 0:
            rows = self._admit(turn, self.waiting[0], budget)
            if rows is None:
                break
            budget -= rows
            self.running.append(self.waiting.popleft())
        turn.begin()
        running = [s for s in self.running if s.filled == s.prompt_length and s.steps_left > 0]
        if any(s.followed for s in turn.begun) and not (self.overlaps and any(s.chunks for s in running)):
            running = []  # a first token with a reader does not wait for steps, unless that would delay other streams
        turn.decode(running, self._steps(running, wasteful) if running else 0)
        return turn if turn.admitted or turn.first or turn.second or turn.running else None

    def _admit(self, turn: Turn, sequence: Sequence, budget: int) -> int | None:
        """Admit a sequence; return the rows that it adds to the turn, or None if it must wait until another has run its
        prefix."""
        target, prefix = turn.first, next((p for p in sequence.prefixes if p.holders), None)
        if prefix is not None:
            holder = prefix.holders[0]
            for parts, copies in ((turn.first, turn.copies), (turn.second, turn.late)):
                if prefix.whole and any(holder is s and end == s.prompt_length for s, _, end in parts):
                    turn.twins.setdefault(id(holder), []).append(sequence)
                    turn.admitted.append(sequence)
                    self._copied(copies, holder, sequence, sequence.prompt_length)
                    return 0
            if holder.filled < prefix.length or any(holder is s for s, _, _ in turn.second):
                return None
            self._copied(turn.copies, holder, sequence, prefix.length)
            target = turn.second
        turn.admitted.append(sequence)
        for prefix in sequence.prefixes:
            prefix.holders.append(sequence)
        return self._run_prompt(target, sequence, budget)

    @staticmethod
    def _copied(copies: list[Copy], source: Sequence, target: Sequence, length: int) -> None:
        target.filled = length
        for copy in copies:
            if copy.source is source and copy.length == length:
                copy.targets.append(target)
                return
        copies.append(Copy(source, [target], length))

    @staticmethod
    def _run_prompt(spans: list[Part], sequence: Sequence, budget: int) -> int:
        rows = min(budget, sequence.prompt_length - sequence.filled)
        spans.append((sequence, sequence.filled, sequence.filled + rows))
        sequence.filled += rows
        return rows

    def _steps(self, running: list[Sequence], wasteful: Callable[[list[Sequence]], bool]) -> int:
        """Few steps while a sequence waits or a reader follows; else as many as the first to end has left, if none is
        wasted."""
        left = [s.steps_left for s in running]
        if self.waiting or any(s.filled < s.prompt_length for s in self.running):
            return min(STEPS_WHILE_WAITING, self.most_steps, max(left))
        followed = [s.chunks for s in running if s.followed]
        if followed:
            usual = STREAM_STEPS if len(running) <= self.crowd else CROWDED_STREAM_STEPS
            return min(FIRST_STREAM_STEPS if min(followed) <= 1 else usual, self.chunk, max(left))
        most = self.chunk if wasteful(running) else self.most_steps
        return min(most, max(left), max(min(left), STEPS_WHILE_WAITING))
