"""Interval sets against sets of integers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.regions import Region

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


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Of few runs and of many, with overlaps and without elements."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    strides = tuple(draw(st.integers(0, 12)) for _ in shape)
    return Region(offset=draw(st.integers(0, 9)), shape=shape, strides=strides)


def elements(region: Region) -> set[int]:
    positions = product(*map(range, region.shape))
    return {region.offset + sum(i * s for i, s in zip(p, region.strides, strict=True)) for p in positions}


@settings(max_examples=300)
@given(INTERVALS, st.lists(regions(), max_size=4), regions())
@example([], [Region(offset=0, shape=(20,), strides=(2,))], Region(offset=1, shape=(20,), strides=(2,)))
@example([(0, 3), (50, 60)], [Region(offset=3, shape=(30, 2), strides=(3, 1))], Region(offset=3, shape=(), strides=()))
def test_set_holds_the_elements_of_regions_and_tells_which_it_holds(
    intervals: list[tuple[int, int]], added: list[Region], asked: Region
) -> None:
    found, expected = IntervalSet(intervals), integers(intervals)
    for region in added:
        found.add_region(region)
        expected |= elements(region)
    assert {i for begin, end in found for i in range(begin, end)} == expected
    assert all(begin < end for begin, end in found)
    assert all(left[1] < right[0] for left, right in pairwise(found))
    assert found.covers_region(asked) == (elements(asked) <= expected)
    assert all(found.covers_region(region) for region in added)
    assert found.touches_region(asked) == bool(elements(asked) & expected)


@given(INTERVALS, regions())
def test_region_without_one_of_its_elements_is_not_covered(intervals: list[tuple[int, int]], region: Region) -> None:
    found = IntervalSet(intervals)
    found.add_region(region)
    for lost in sorted(elements(region))[:: max(1, len(elements(region)) // 3)]:
        rest = IntervalSet(_without(found, lost))
        assert not rest.covers_region(region)
        rest.add_region(region)
        assert list(rest) == list(found)


def _without(found: IntervalSet, lost: int) -> Iterator[tuple[int, int]]:
    for begin, end in found:
        yield from [(begin, lost), (lost + 1, end)] if begin <= lost < end else [(begin, end)]


def test_regions_past_the_range_of_32_bits_stay_exact() -> None:
    columns = Region(offset=1 << 40, shape=(256, 1 << 24), strides=(1 << 32, 1))
    found = IntervalSet()
    found.add_region(columns)
    assert found.total == 1 << 32
    assert found.covers_region(columns)
    assert not found.covers_region(columns.shifted(1))
    for at in range(1, 256):
        found.add_region(columns.shifted(at << 24))
    assert list(found) == [(1 << 40, (1 << 40) + (256 << 32))]


def test_set_holds_numbers_of_any_size() -> None:
    found = IntervalSet([(0, 2**62), (2**62, 2**70)])
    assert list(found) == [(0, 2**70)]
    assert found.covers(2**69, 2**70)


def test_set_says_in_repr_what_it_holds() -> None:
    assert repr(IntervalSet([(1, 2), (5, 7)])) == "IntervalSet([(1, 2), (5, 7)])"
