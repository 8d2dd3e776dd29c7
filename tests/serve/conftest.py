"""A small model behind a server, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.live import Live, serving
from warpline import LLM


@pytest.fixture(scope="package")
def llm() -> LLM:
    """A small model with logits so flat that sampled text has every kind of token."""
    model = "random:n_layer=2,n_head=2,n_embd=32,n_positions=256"
    return LLM(model, device="cpu", dtype="fp32", max_batch=8, threads=1)


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    """The small model, served."""
    llm.close = lambda: None  # type: ignore[method-assign]  # the next file has it too
    with serving(llm) as server:
        yield server
        server.wait_until_empty()
