"""Text in columns: never wider than it may be, and names are told apart for as long as possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from weightwire.service.cli.text_columns import (
    Column,
    column_line,
    column_widths,
    fold_sentence,
    shorten_name,
    shorten_sentence,
)

WORDS = st.text(st.characters(exclude_categories=["C", "Z", "M"]), max_size=30)


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        pytest.param("source-d073e90bb349", 19, "source-d073e90bb349", id="it fits"),
        pytest.param("source-d073e90bb349", 11, "sourc…bb349", id="the middle goes"),
        pytest.param("source-d073e90bb349", 4, "so…9", id="the beginning keeps more"),
        pytest.param("source", 1, "…", id="no room for a letter"),
        pytest.param("source", 0, "", id="no room at all"),
        pytest.param("重み-重み-重み", 7, "重…み", id="letters of two cells are not cut"),
    ],
)
def test_name_is_shortened_in_its_middle(name: str, width: int, expected: str) -> None:
    assert shorten_name(name, width) == expected


@given(WORDS, st.integers(0, 40))
def test_name_and_sentence_are_never_wider_than_asked_for(text: str, width: int) -> None:
    assert cell_len(shorten_name(text, width)) <= width
    assert cell_len(shorten_sentence(text, width)) <= width


def test_sentence_is_folded_at_words_with_a_margin() -> None:
    assert fold_sentence("rank 0 has published nothing", 18, indent=2) == ["  rank 0 has", "  published", "  nothing"]


def test_long_names_give_way_first_and_evenly() -> None:
    columns = [Column(heading="a", least=4), Column(heading="b", least=4), Column(heading="c")]
    rows = [["a" * 20, "b" * 12, "ccc"], ["a", "b", "c"]]
    assert column_widths(columns, rows, 100) == [20, 12, 3]
    assert column_widths(columns, rows, 27) == [10, 10, 3]
    assert column_widths(columns, rows, 3) == [4, 4, 3]


@given(st.lists(st.tuples(WORDS, WORDS, st.integers(0, 9999)), min_size=1), st.integers(24, 90))
def test_row_is_never_wider_than_the_page(words: list[tuple[str, str, int]], width: int) -> None:
    columns = [Column(heading="x", least=8), Column(heading="y", least=8), Column(heading="n", right=True)]
    rows = [[first, second, str(number)] for first, second, number in words]
    widths = column_widths(columns, rows, width)
    assert all(cell_len(column_line(columns, widths, row)) <= width for row in rows)


def test_numbers_stand_at_the_right() -> None:
    columns = [Column(heading="name"), Column(heading="n", right=True), Column(heading="last")]
    assert column_line(columns, [4, 3, 6], ["ab", "7", "z"]) == "ab      7  z"
