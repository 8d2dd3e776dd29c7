"""A parsed request: prompts as ids, settings, and the jobs that the engine gets for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warpline.config import SamplingParams
from warpline.serve.choice import Choice
from warpline.serve.pieces import Itemised, Maker, Plain, Stopped

if TYPE_CHECKING:
    from warpline.serve.generation import Generation
    from warpline.serve.state import State

#: Seeds for requests without one; seeded by the system.
_SEEDS = random.Random()


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request, checked and tokenized."""

    texts: list[str]  # prompts as text, where they are echoed
    ids: list[list[int]]
    params: list[SamplingParams]  # for each prompt
    n: int
    streamed: bool
    nothing: bool  # no token is wanted: the prompt is only scored or echoed
    echoes: bool
    logprobs: int | None
    interval: int | None
    returns_ids: bool
    wants_usage: bool
    wants_timings: bool
    began: float  # when the request came

    @property
    def plain(self) -> bool:
        """Whether events contain nothing but text."""
        return self.logprobs is None and not self.returns_ids

    def prompt_of(self, choice: Choice) -> int:
        """Return the index of the prompt that this choice continues."""
        return choice.index // self.n

    def offsets(self, number: int, state: State) -> list[int]:
        """Return the character at which each token of a prompt begins."""
        decoder, found, count = state.backend.tokenizer.stream(special=True), [], 0
        for token in self.ids[number]:
            found.append(count)
            count += len(decoder.push(token))
        return found

    def begin(self, answer: Generation, state: State) -> tuple[list[Choice], list[Choice]]:
        """Make a job for each completion, and one for each prompt whose tokens are to be scored."""
        choices, scorers = [], []
        for number, (ids, params) in enumerate(zip(self.ids, self.params, strict=True)):
            seed = _SEEDS.getrandbits(32) if params.seed is None else params.seed
            for sample in range(self.n):
                choices.append(self._choice(answer, state, number, seed, sample, ids, params))
            if self.echoes and self.logprobs is not None:
                scorers.append(self._scorer(answer, state, ids))
        return choices, scorers

    def _choice(
        self,
        answer: Generation,
        state: State,
        number: int,
        seed: int,
        sample: int,
        ids: list[int],
        params: SamplingParams,
    ) -> Choice:
        from warpline.engine.job import Job
        from warpline.engine.request import Request
        from warpline.engine.text import Timings, watched

        backend, limit = state.backend, len(ids) + params.max_tokens
        job = Job(
            Request(ids, params, seed, sample, limit),
            followed=True,
            timings=Timings(backend.config, backend.dtype, backend.kv_dtype),
        )
        text = watched(job, backend.tokenizer, backend.config.eos_token_id) if params.stops else None
        if self.logprobs is not None or (self.interval is not None and self.streamed):
            interval = self.interval if self.streamed else None
            before = len(self.texts[number]) if self.echoes else 0
            maker: Maker = Itemised(backend.tokenizer, text, interval, before)
        else:
            maker = Plain(state.table) if text is None else Stopped(text)
        index = number * self.n + sample
        choice = Choice(answer, state.hub, job, index, maker, streamed=self.streamed, eager=self.interval == 1)
        if self.nothing:
            job.finish_reason, job.finished = "length", True
            choice.finished = choice.closed = choice.changed = True
        return choice

    def _scorer(self, answer: Generation, state: State, ids: list[int]) -> Choice:
        """Make a job that forces the prompt's tokens after the first and records their log-probabilities."""
        from warpline.engine.job import Job
        from warpline.engine.request import Request

        params = SamplingParams(temperature=0, ignore_eos=True, logprobs=self.logprobs)
        job = Job(Request(ids[:1], params, 0, 0, max(len(ids), 2), forced=ids[1:]))
        return Choice(answer, state.hub, job, -1, None, streamed=False, eager=False)
