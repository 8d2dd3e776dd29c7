"""Which parts of a matrix threads read."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from warpline.kernels.cpu.sharing import part_of


@given(pieces=st.integers(1, 200), threads=st.integers(1, 40))
def test_threads_that_take_turns_read_on_where_they_were(pieces: int, threads: int) -> None:
    parts = [part_of.py_func(piece, pieces, threads) for piece in range(pieces)]
    assert sorted(parts) == list(range(pieces))
    for me in range(threads):
        own = parts[: pieces // threads * threads][me::threads]
        assert all(after == before + 1 for before, after in pairwise(own))
