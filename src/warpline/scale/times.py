"""What turns of the engine take on one replica: measured once, then asked for any number of sequences. No torch."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from warpline.config import SamplingParams

if TYPE_CHECKING:
    from warpline.engine.llm import LLM

#: Sequences at once, and tokens of prompts in a pass, that are measured; what lies between is on a straight line.
LANES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (8, 32, 128, 512, 2048)
#: Steps, tokens of the prompts before them, and how often each point is measured.
STEPS, BEFORE, REPEATS = 48, 8, 3
#: Tokens of prompts that show what the context costs.
LONG = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds, and how the engine of this replica cuts its work into turns."""

    steps: tuple[tuple[int, float], ...]  # sequences at once → one step of all of them, at a short context
    position: float  # of a step, for each position in the caches of its sequences
    prompts: tuple[tuple[int, float], ...]  # tokens of prompts → their pass
    turn: float = 0.0  # the host's, for each turn
    request: float = 0.0  # between a client and the engine, there and back
    slots: int = 32
    prompt_tokens: int = 2048
    chunk: int = 8
    most_steps: int = 32
    halts: bool = True  # whether a newcomer ends a launch behind its step

    def step(self, lanes: int, positions: int) -> float:
        """One step of so many sequences that have so many positions together."""
        return between(self.steps, lanes) + self.position * positions

    def prompt(self, tokens: int) -> float:
        """A pass over prompts."""
        return between(self.prompts, tokens) if tokens else 0.0

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Times:
        """From such a row."""
        named = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        for name in ("steps", "prompts"):
            named[name] = tuple((int(at), float(value)) for at, value in named[name])
        return cls(**named)


def between(points: Sequence[tuple[int, float]], at: float) -> float:
    """On the straight line between the two points around it, or through the outermost two."""
    if len(points) == 1:
        return points[0][1]
    i = min(max(1, bisect.bisect_left(points, (at,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def measured(llm: LLM, advance: Callable[[float], None] = lambda amount: None) -> Times:
    """Of a model that is loaded, with nothing else running."""
    context, slots = llm.config.n_positions, llm.max_batch
    lanes = [n for n in LANES if n < slots] + [slots]
    short = min(BEFORE, context // 4)
    steps = min(STEPS, context // 2)

    def decoded(count: int, prompt: int) -> float:
        return min(_generated(llm, count, prompt, steps)[1] for _ in range(REPEATS))

    found = []
    for count in lanes:
        found.append((count, decoded(count, short)))
        advance(1)
    long = min(LONG, context - steps - 1)
    position = (decoded(slots, long) - found[-1][1]) / (slots * (long - short)) if long > short else 0.0
    position = max(0.0, position)
    mean = short + steps / 2
    prompts = []
    for tokens in PROMPTS:
        count = -(-tokens // min(tokens, context - 2, 128))
        if count <= slots and tokens <= llm.executor.prompt_tokens:
            prompts.append((tokens, min(_generated(llm, count, tokens // count, 2)[0] for _ in range(REPEATS))))
        advance(1)
    # What the host does beside: a stream of one sequence, whose turns are known, less its prompt and its steps.
    turns, wall = min((_streamed(llm, short, steps) for _ in range(REPEATS)), key=lambda found: found[1])
    rest = wall - (steps - 1) * found[0][1] - between(prompts, short)
    return Times(
        steps=tuple((count, max(0.0, seconds - position * count * mean)) for count, seconds in found),
        position=position,
        prompts=tuple(prompts),
        turn=max(0.0, rest / turns),
        slots=slots,
        prompt_tokens=llm.executor.prompt_tokens,
        chunk=llm.executor.chunk,
        most_steps=max(llm.executor.chunk, llm.executor.most_steps),
        halts=llm.device.kind == "cpu",
    )


def _prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """That do not begin alike: beginnings that are shared would run once."""
    vocab = llm.config.vocab_size
    return [[(i * 7919 + j * 104_729 + 11) % (vocab - 1) for j in range(length)] for i in range(count)]


def _generated(llm: LLM, count: int, prompt: int, new: int) -> tuple[float, float]:
    """Seconds of the prompts, and of a step."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    timings = llm.generate(_prompts(llm, count, prompt), params)[0].timings
    return timings.prefill_seconds, timings.decode_seconds / max(1, timings.decode_steps)


def _streamed(llm: LLM, prompt: int, new: int) -> tuple[int, float]:
    """Turns, and seconds of all of them."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    handle = llm.submit(_prompts(llm, 1, prompt)[0], params)
    handle.result()
    wall = time.perf_counter() - began
    return 1 + -(-(new - 5) // llm.executor.chunk), wall
