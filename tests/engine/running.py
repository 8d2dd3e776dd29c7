"""Runs an executor to the end without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from warpline.engine.executors.base import Executor
from warpline.engine.request import Request, Span
from warpline.engine.slots import Slots


def spans(slots: Slots, lanes: Sequence[int]) -> list[Span]:
    """Return spans of whole prompts with a first token for each of these slots."""
    return [Span(slot, 0, len(slots.request(slot).prompt), (slot,)) for slot in lanes]


def news(slots: Slots, lanes: Sequence[int]) -> list[list[int]]:
    """Return the tokens of these slots since the last report."""
    found = slots.report(lanes, slots.capacity).wait()
    return [row[:count].tolist() for row, count in zip(found.tokens, found.counts.tolist(), strict=True)]


def run(executor: Executor, requests: Sequence[Request], slots: Slots | None = None, chunk: int = 7) -> list[list[int]]:
    """Return the new tokens of each request: all admitted at once, prompts run whole, then `chunk` steps at a time."""
    slots = slots or executor.allocate(len(requests), max(request.limit for request in requests))
    lanes = slots.admit(requests)
    executor.prefill(slots, spans(slots, lanes))
    left = max(request.limit - len(request.prompt) for request in requests) - 1
    while left > 0:
        executor.decode(slots, lanes, min(chunk, left))
        left -= chunk
    found = news(slots, lanes)
    for slot in lanes:
        slots.release(slot)
    return found
