"""Requests that come and go at random; each must give the same as alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from warpline import LLM, Completion, SamplingParams
from warpline.engine.handle import Handle


@dataclass(slots=True)
class Arrival:
    """A submitted request."""

    prompt: list[int]
    params: SamplingParams
    handle: Handle
    cancelled: bool = False


def random_params(rng: random.Random, *, longest: int, sampled: bool = True) -> SamplingParams:
    """Return any settings; half of them are greedy."""
    drawn = sampled and rng.random() < 0.5
    return SamplingParams(
        max_tokens=rng.randint(1, longest),
        temperature=rng.choice([0.7, 1.0]) if drawn else 0.0,
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([0.9, 1.0]),
        min_p=rng.choice([0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]) if sampled else 1.0,
        presence_penalty=rng.choice([0.0, 0.0, 1.5]) if sampled else 0.0,
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]) if sampled else 0.0,
        logit_bias={3: 2.0, 9: -3.0} if sampled and rng.random() < 0.3 else (),
        min_tokens=rng.choice([0, 0, 1]),
        seed=rng.randrange(100),
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice([(), (), ("e",), (" a", "zz")]) if sampled else (),
        logprobs=rng.choice([None, None, None, 2]) if sampled else None,
    )


def random_prompt(rng: random.Random, vocab: int, longest: int) -> list[int]:
    """Return a prompt of any length; some share their beginning."""
    common = [1 + i % 7 for i in range(longest)]
    shared = rng.choice([0, 0, rng.randint(0, longest - 1)])
    return common[:shared] + [rng.randrange(vocab) for _ in range(rng.randint(1, longest - shared))]


def run_arrivals(llm: LLM, count: int, seed: int, *, longest: int, sampled: bool = True) -> list[Arrival]:
    """Submit `count` requests between turns, cancel some, and finish. The engine's own thread is not used, so that a
    seed determines the history."""
    rng, arrivals = random.Random(seed), list[Arrival]()
    engine, vocab = llm.engine, llm.config.vocab_size
    llm._worker.wake = lambda: None  # type: ignore[method-assign]
    while len(arrivals) < count or not engine.idle:
        for _ in range(min(rng.choice([0, 0, 1, 2, 9]), count - len(arrivals))):
            prompt = random_prompt(rng, vocab, longest)
            params = random_params(rng, longest=llm.config.n_positions - longest, sampled=sampled)
            arrivals.append(Arrival(prompt, params, llm.submit(prompt, params)))
        if arrivals and rng.random() < 0.2:
            chosen = rng.choice(arrivals)
            if not chosen.handle.finished:
                chosen.handle.cancel()
                chosen.cancelled = True
        engine.step()
    assert engine.free == engine.count
    return arrivals


class Alone:
    """Computes completions where nothing else runs, and caches them."""

    def __init__(self, llm: LLM):
        self._llm, self._known = llm, dict[tuple[tuple[int, ...], SamplingParams], Completion]()

    def complete(self, prompt: list[int], params: SamplingParams) -> Completion:
        key = (tuple(prompt), params)
        if key not in self._known:
            (self._known[key],) = self._llm.generate(prompt, params)
        return self._known[key]


def check_alone(alone: Alone, arrivals: list[Arrival]) -> int:
    """Return how many completions differ from those computed alone; a cancelled one must be a beginning of it."""
    return sum(not _agrees(arrival, alone.complete(arrival.prompt, arrival.params)) for arrival in arrivals)


def _agrees(arrival: Arrival, expected: Completion) -> bool:
    found = arrival.handle.result(timeout=0)
    if arrival.cancelled:
        assert found.finish_reason == "cancelled"
        return expected.token_ids[: len(found.token_ids)] == found.token_ids
    same = (found.token_ids, found.text, found.finish_reason) == (
        expected.token_ids, expected.text, expected.finish_reason,
    )  # fmt: skip
    if same and arrival.params.logprobs is not None:
        pairs = zip(found.logprobs or (), expected.logprobs or (), strict=True)
        assert all(a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-3 for a, b in pairs)
    return same
