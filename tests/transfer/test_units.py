"""What is left of regions, who sends which part of them, and how the parts become copies."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.plan import Copy
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.units import Unit, dealt, merged, missing_positions

KIB = 1 << 10


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * stride for i, stride in zip(p, region.strides, strict=True)) for p in positions]


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Boxes in any order of axes, no element twice."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis] + draw(st.integers(0, 1))
    return Region(offset=draw(st.integers(0, 3)), shape=shape, strides=tuple(strides))


@given(regions(), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=6), st.data())
def test_missing_positions_are_those_whose_byte_is_not_covered(
    region: Region, intervals: list[tuple[int, int]], data: st.DataObject
) -> None:
    covered = IntervalSet(intervals)
    begin = data.draw(st.integers(0, region.numel))
    end = data.draw(st.integers(begin, region.numel))
    found = list(missing_positions(region, begin, end, covered))
    at = indices(region)
    expected = [position for position in range(begin, end) if not covered.covers(at[position], at[position] + 1)]
    assert [position for low, high in found for position in range(low, high)] == expected
    assert all(low < high for low, high in found)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(found))


@given(regions(), st.data())
def test_copies_of_a_part_are_that_part_on_both_sides(target: Region, data: st.DataObject) -> None:
    """Source and target walk through other boxes, in the same order."""
    source = row_major((target.numel,), offset=7)
    if data.draw(st.booleans()):
        source = Region(
            offset=7, shape=target.shape, strides=tuple(2 * stride for stride in row_major(target.shape).strides)
        )
    begin = data.draw(st.integers(0, target.numel - 1))
    end = data.draw(st.integers(begin + 1, target.numel))
    copies = list(Unit("t", target, begin, end, ((0, source),)).copies(source))
    assert [i for copy in copies for i in indices(copy.target)] == indices(target)[begin:end]
    assert [i for copy in copies for i in indices(copy.source)] == indices(source)[begin:end]


def unit(region: Region) -> Unit:
    return Unit("t", region, 0, region.numel, ())


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 900), st.sampled_from([0, 1, 7])), min_size=1, max_size=12), st.data())
def test_units_are_dealt_whole_or_in_parts_and_each_holder_gets_about_its_share(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Units of up to some MiB, contiguous or in rows of 4 KiB with gaps between them."""
    units = [
        unit(
            Region(offset=0, shape=(rows, 4 * KIB), strides=(4 * KIB + gap, 1)) if gap else row_major((rows * 4 * KIB,))
        )
        for rows, gap in sizes
    ]
    total = sum(part.nbytes for part in units)
    weights = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    shares = {holder: total * weight // sum(weights) for holder, weight in enumerate(weights)}
    shares[0] += total - sum(shares.values())
    found = list(dealt(units, shares))
    parts = [part for part, _ in found]
    assert [(part.target, part.begin) for part in parts if part.begin == 0] == [(part.target, 0) for part in units]
    at = 0
    for part in parts:
        assert part.begin == (0 if part.begin == 0 else at)
        assert part.begin < part.end
        # A part that is not worth a request is not cut off.
        assert part.nbytes >= 64 * KIB or (part.begin, part.end) == (0, part.target.numel)
        at = part.end
    assert sum(part.nbytes for part in parts) == total
    loads = Counter[int]()
    for part, holder in found:
        loads[holder] += part.nbytes
    # Each end of a share is off by half of what is not cut any more, or by a cut that is not just there.
    assert all(abs(loads[holder] - share) <= 2 * 128 * KIB for holder, share in shares.items())


def test_what_each_cut_leaves_over_does_not_pile_up_on_the_last_holder() -> None:
    """Shares that end just before a place where a unit may be cut."""
    share = 6 * 64 * KIB - 1
    found = list(dealt([unit(row_major((12 * share,)))], dict.fromkeys(range(12), share)))
    loads = Counter({holder: part.nbytes for part, holder in found})
    assert sum(loads.values()) == 12 * share
    assert all(abs(loads[holder] - share) <= 64 * KIB for holder in range(12))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.booleans()), max_size=8), st.integers(-3, 3))
def test_merged_copies_are_the_same_bytes_in_the_order_of_the_source(
    spans: list[tuple[int, int, bool]], shift: int
) -> None:
    copies = []
    for begin, length, is_strided in spans:
        step = 2 if is_strided else 1
        source = Region(offset=begin, shape=(length,), strides=(step,))
        copies.append(Copy(source=source, target=source.shifted(3 + (shift if is_strided else 0))))
    found = list(merged(copies))
    pairs = [pair for copy in found for pair in zip(indices(copy.source), indices(copy.target), strict=True)]
    assert Counter(pairs) == Counter(
        pair for copy in copies for pair in zip(indices(copy.source), indices(copy.target), strict=True)
    )
    assert [copy.source.offset for copy in found] == sorted(copy.source.offset for copy in found)


def test_neighbours_on_both_sides_become_one_copy() -> None:
    def copy(source: int, target: int, nbytes: int) -> Copy:
        return Copy(source=row_major((nbytes,), offset=source), target=row_major((nbytes,), offset=target))

    assert list(merged([copy(8, 18, 4), copy(0, 10, 8)])) == [copy(0, 10, 12)]
    assert list(merged([copy(0, 10, 8), copy(8, 19, 4)])) == [copy(0, 10, 8), copy(8, 19, 4)]
