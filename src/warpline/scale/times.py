"""Times of the engine's turns on one replica, measured once and interpolated for other loads. Needs no torch."""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from warpline.config import SamplingParams

if TYPE_CHECKING:
    from warpline.engine.llm import LLM

#: Numbers of sequences, and of prompt tokens in a pass, that are measured; between them times are interpolated.
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (8, 32, 128, 512, 2048)
#: Steps, prompt tokens before them, and how often each point is measured.
STEPS, BEFORE, ROUNDS = 48, 8, 4
#: Prompt tokens that show the cost of a long context.
LONG = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times in seconds, and how the engine of this replica divides its work into turns."""

    steps: tuple[tuple[int, float], ...]  # sequences → seconds of one step of all, at a short context
    position: float  # of a step, for each position in the caches of its sequences
    prompts: tuple[tuple[int, float], ...]  # tokens of prompts → seconds of their pass
    turn: float = 0.0  # of each turn, besides its steps
    request: float = 0.0  # between client and engine, both ways together
    slots: int = 32
    prompt_tokens: int = 2048
    chunk: int = 8
    most_steps: int = 32
    crowd: int = 4
    halts: bool = True  # whether a new request ends a launch after its current step
    overlaps: bool = False  # whether the first tokens of a turn are reported before its end

    def step(self, lanes: int, positions: int) -> float:
        """Return the seconds of one step of `lanes` sequences that have `positions` positions together."""
        return between(self.steps, lanes) + self.position * positions

    def prompt(self, tokens: int) -> float:
        """Return the seconds of a pass over prompts."""
        return between(self.prompts, tokens) if tokens else 0.0

    def row(self) -> dict[str, Any]:
        """Return the times as a JSON object."""
        return asdict(self)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Times:
        """Return the times from such an object."""
        named = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        for name in ("steps", "prompts"):
            named[name] = tuple((int(at), float(value)) for at, value in named[name])
        return cls(**named)


def between(points: Sequence[tuple[int, float]], at: float) -> float:
    """Interpolate between the two points around `at`, or extrapolate from the outermost two."""
    if len(points) == 1:
        return points[0][1]
    i = min(max(1, bisect.bisect_left(points, (at,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def measured(llm: LLM, advance: Callable[[float], None] = lambda amount: None) -> Times:
    """Measure a loaded model with nothing else running. Steps are those of streams, as in a server, so that they
    include the host's work between two launches. Every point is measured in every round, and its mean counts: the speed
    of a machine changes from minute to minute, and a server has the mean of it."""
    context, slots = llm.config.n_positions, llm.max_batch
    lanes = [n for n in LANES if n < slots] + [slots]
    short, steps = min(BEFORE, context // 4), min(STEPS, context // 2)
    long = min(LONG, context - steps - 1)
    passes = [tokens for tokens in PROMPTS if tokens <= llm.executor.prompt_tokens]
    passes = [tokens for tokens in passes if -(-tokens // min(128, context - 2)) <= slots]
    decoded: dict[tuple[int, int], list[float]] = {}
    prompted: dict[int, list[float]] = {}
    for tokens in passes:  # the first pass of each size is slower; a running server has had it
        _prompted(llm, -(-tokens // min(tokens, context - 2, 128)), min(tokens, context - 2, 128))
    for _ in range(ROUNDS):
        for tokens in passes:
            count = -(-tokens // min(tokens, context - 2, 128))
            prompted.setdefault(tokens, []).append(_prompted(llm, count, tokens // count))
        prompts = tuple((tokens, statistics.fmean(found)) for tokens, found in prompted.items())
        for count, prompt in (*((one, short) for one in lanes), (slots, long)):
            seconds = _streamed(llm, count, prompt, steps) - _passes(
                prompts, count * prompt, llm.executor.prompt_tokens
            )
            decoded.setdefault((count, prompt), []).append(max(0.0, seconds / (steps - 1)))
            advance(1)
    mean = {point: statistics.fmean(found) for point, found in decoded.items()}
    position = 0.0
    if long > short:
        position = max(0.0, mean[slots, long] - mean[slots, short]) / (slots * (long - short))
    middle = short + steps / 2
    return Times(
        steps=tuple((count, max(0.0, mean[count, short] - position * count * middle)) for count in lanes),
        position=position,
        prompts=prompts,
        slots=slots,
        prompt_tokens=llm.executor.prompt_tokens,
        chunk=llm.executor.chunk,
        most_steps=max(llm.executor.chunk, llm.executor.most_steps),
        crowd=llm.executor.crowd,
        halts=llm.device.kind == "cpu",
        overlaps=llm.engine.scheduler.overlaps,
    )


def _passes(prompts: Sequence[tuple[int, float]], tokens: int, most: int) -> float:
    """Return the seconds of prompts that may take several passes."""
    whole, rest = divmod(tokens, most)
    return whole * between(prompts, most) + (between(prompts, rest) if rest else 0.0)


def _prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Return prompts with different beginnings, because shared ones would run only once."""
    vocab = llm.config.vocab_size
    return [[(i * 7919 + j * 104_729 + 11) % (vocab - 1) for j in range(length)] for i in range(count)]


def _prompted(llm: LLM, count: int, length: int) -> float:
    """Return the seconds of a pass over prompts."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    return llm.generate(_prompts(llm, count, length), params)[0].timings.prefill_seconds


def _streamed(llm: LLM, count: int, prompt: int, new: int) -> float:
    """Return the seconds of streams that begin together."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    prompts = _prompts(llm, count, prompt)
    began = time.perf_counter()
    for handle in [llm.submit(one, params) for one in prompts]:
        handle.result()
    return time.perf_counter() - began
