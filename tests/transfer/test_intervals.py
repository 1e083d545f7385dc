"""Interval sets against sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.intervals import IntervalSet

INTERVALS = st.lists(st.tuples(st.integers(-2, 40), st.integers(-2, 40)), max_size=12)
BOUND = st.integers(-3, 42)


def integers(intervals: list[tuple[int, int]]) -> set[int]:
    return {i for begin, end in intervals for i in range(begin, end)}


@given(INTERVALS)
def test_set_holds_what_was_added_in_sorted_intervals_that_do_not_touch(intervals: list[tuple[int, int]]) -> None:
    found = IntervalSet(intervals)
    assert integers(list(found)) == integers(intervals)
    assert found.total == len(integers(intervals))
    assert all(begin < end for begin, end in found)
    assert all(left[1] < right[0] for left, right in pairwise(found))


@given(INTERVALS)
def test_set_does_not_depend_on_the_order_of_adding(intervals: list[tuple[int, int]]) -> None:
    assert list(IntervalSet(intervals)) == list(IntervalSet(reversed(intervals)))


@given(INTERVALS, BOUND, BOUND)
def test_covers_says_whether_every_integer_is_there(intervals: list[tuple[int, int]], begin: int, end: int) -> None:
    assert IntervalSet(intervals).covers(begin, end) == set(range(begin, end)).issubset(integers(intervals))


@given(INTERVALS, BOUND, BOUND)
def test_missing_is_what_is_not_there_ascending(intervals: list[tuple[int, int]], begin: int, end: int) -> None:
    gaps = list(IntervalSet(intervals).missing(begin, end))
    assert [i for gap in gaps for i in range(*gap)] == sorted(set(range(begin, end)) - integers(intervals))
    assert all(low < high for low, high in gaps)
    assert all(left[1] < right[0] for left, right in pairwise(gaps))


def test_set_holds_numbers_of_any_size() -> None:
    found = IntervalSet([(0, 2**62), (2**62, 2**70)])
    assert list(found) == [(0, 2**70)]
    assert found.covers(2**69, 2**70)


def test_set_says_in_repr_what_it_holds() -> None:
    assert repr(IntervalSet([(1, 2), (5, 7)])) == "IntervalSet([(1, 2), (5, 7)])"
