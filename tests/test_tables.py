"""Tables for terminals of any width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpline import tables

TITLES = ("method", "median s", "tok/s", "% of limit", "why")
ROWS = [
    ("ctranslate2-int8 (96.0 % same)", "18,237.1234", "1,440.73", "106.7*", "A sentence of some length that explains."),
    ("cpu", "0.3250", "162.96", "n/a", ""),
]


@given(st.integers(24, 140), st.sampled_from([None, "why"]), st.sampled_from([(), ("tok/s",), ("median s", "why")]))
def test_nothing_is_wider_than_the_terminal_and_no_figure_is_cut(
    width: int, prose: str | None, least: tuple[str, ...]
) -> None:
    text = tables.drawn(TITLES, ROWS, width=width, prose=prose, least=least)
    assert max(map(len, text.splitlines())) <= width
    left_out = text.partition("Left out")[2].replace("\n", " ")
    for i, title in enumerate(TITLES[1:4], 1):
        assert (title in left_out) != all(row[i] in text.partition("Left out")[0] for row in ROWS)
    assert "cpu" in text


def test_where_there_is_no_terminal_a_row_is_a_line() -> None:
    text = tables.drawn(TITLES, ROWS * 20)
    assert len(text.splitlines()) == 41
    assert "Left out" not in text


def test_columns_go_in_the_order_that_is_asked_for() -> None:
    kept = tables.drawn(TITLES, ROWS, width=60, least=("why", "tok/s"))
    assert "Left out, as this is narrow: why." in kept
    assert "1,440.73" in kept


def test_prose_stands_below_its_row_where_there_is_no_room_beside_it() -> None:
    wide, narrow = (tables.drawn(TITLES, ROWS, width=width, prose="why").splitlines() for width in (140, 70))
    assert wide[1].endswith("explains.")
    assert narrow[2:4] == ["(96.0 % same)", "  A sentence of some length that explains."] or narrow[2].startswith("  A")


def test_figures_are_flush_right_and_a_table_without_titles_has_no_line_for_them() -> None:
    assert tables.drawn(("a", "b"), [("x", "1"), ("y", "10")]).splitlines() == ["a   b", "x   1", "y  10"]
    assert tables.drawn(("", ""), [("x", "some words")]).splitlines() == ["x  some words"]


def test_names_may_be_broken_but_not_figures() -> None:
    text = tables.drawn(("kernel", "µs"), [("aten::_scaled_dot_product_flash_attention_for_cpu", "1,234.5")], width=40)
    assert "1,234.5" in text
    assert "…" not in text


@pytest.mark.parametrize("text", ["1,234.5", "0.98× loses", "12 %", "106.7*", "~0.02", "n/a", "", "3.96e-04", "4.6 GB"])
def test_what_is_a_figure(text: str) -> None:
    assert tables._FIGURE.fullmatch(text)


def test_prose_is_wrapped_at_the_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    tables.say("word " * 60)
    assert capsys.readouterr().out.count("\n") == 1
