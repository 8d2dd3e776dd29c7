"""The line of statistics of `warpline generate`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from warpline.cli import generate


@pytest.mark.parametrize(
    ("moved", "share", "said"),
    [
        (40, 0.9, ""),
        (20, 3.0, " (from caches)"),
        (40, 3.9, " (partly from caches)"),  # a cache of 30 leaves 10 to be read from memory
        (40, 4.1, " (run warpline doctor again)"),
        (400, 1.2, " (run warpline doctor again)"),
    ],
)
def test_a_rate_beyond_memory_is_explained(
    monkeypatch: pytest.MonkeyPatch, moved: float, share: float, said: str
) -> None:
    monkeypatch.setattr(generate, "cache_bytes", lambda _: 30)
    llm, timings = SimpleNamespace(executor=SimpleNamespace(device="cpu")), SimpleNamespace()
    timings.decode_bytes, timings.decode_steps = 7 * moved, 7
    assert generate._beyond(llm, timings, share) == said  # type: ignore[arg-type]


def test_without_a_known_cache_the_limit_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "cache_bytes", lambda _: None)
    llm = SimpleNamespace(executor=SimpleNamespace(device="cpu"))
    timings = SimpleNamespace(decode_bytes=10, decode_steps=1)
    assert generate._beyond(llm, timings, 1.5) == " (run warpline doctor again)"  # type: ignore[arg-type]
