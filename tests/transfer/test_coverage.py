"""Counting what is written."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.coverage import Coverage, count_coverage
from weightwire.transfer.errors import RegionError
from weightwire.transfer.regions import Region, row_major

boxes = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=3).flatmap(
    lambda sizes: st.integers(0, 12).map(
        lambda offset: Region(
            offset=offset, shape=tuple(size for size, _ in sizes), strides=tuple(stride for _, stride in sizes)
        )
    )
)


def elements(region: Region) -> Counter[int]:
    return Counter(
        region.offset + sum(index * stride for index, stride in zip(at, region.strides, strict=True))
        for at in product(*(range(size) for size in region.shape))
    )


@given(st.lists(boxes, max_size=6))
def test_counts_equal_those_of_index_sets(written: list[Region]) -> None:
    """Boxes that overlap each other, or themselves."""
    shell = row_major((4, 5), offset=3)
    own, seen = set(elements(shell)), Counter[int]()
    for region in written:
        seen += elements(region)
    assert count_coverage(shell, written) == Coverage(
        elements=20,
        missing=len(own - set(seen)),
        repeated=sum(seen.values()) - len(seen),
        outside=len(set(seen) - own),
    )


def test_columns_and_their_padding_make_a_whole_past_the_range_of_32_bits() -> None:
    shape, strides = (128, 7168, 4096), (7168 * 4096, 4096, 1)
    left = Region(offset=0, shape=(128, 7168, 4000), strides=strides)
    right = Region(offset=4000, shape=(128, 7168, 96), strides=strides)
    shell = Region(offset=0, shape=shape, strides=strides)
    assert count_coverage(shell, [right, left]).is_exact
    assert count_coverage(shell, [left]).missing == 128 * 7168 * 96


def test_an_empty_shell_is_covered_by_nothing() -> None:
    assert count_coverage(row_major((0, 3)), []).is_exact


def test_more_runs_than_memory_can_count_are_refused_though_no_region_has_too_many() -> None:
    columns = [Region(offset=at, shape=(1 << 23,), strides=(8,)) for at in (0, 2, 4)]
    with pytest.raises(RegionError, match="alone or with others"):
        count_coverage(row_major((1 << 26,)), columns)
