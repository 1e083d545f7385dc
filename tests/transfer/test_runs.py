"""Runs as arrays against sets of integers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.errors import RegionError
from weightwire.transfer.regions import Region, row_major
from weightwire.transfer.runs import NO_RUNS, Runs, merged_runs, runs_of


@st.composite
def regions(draw: st.DrawFn) -> Region:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    strides = tuple(draw(st.integers(0, 9)) for _ in shape)
    return Region(offset=draw(st.integers(0, 5)), shape=shape, strides=strides)


def indices(region: Region) -> list[int]:
    positions = itertools.product(*map(range, region.shape))
    return [region.offset + sum(i * stride for i, stride in zip(p, region.strides, strict=True)) for p in positions]


def elements(runs: Runs) -> list[int]:
    return [i for begin, end in zip(*map(np.ndarray.tolist, runs), strict=True) for i in range(begin, end)]


def arrays(runs: list[tuple[int, int]]) -> Runs:
    begins, ends = zip(*runs, strict=True) if runs else ((), ())
    return np.array(begins, dtype=np.int64), np.array(ends, dtype=np.int64)


@given(regions())
def test_runs_have_each_element_as_often_as_the_region_has(region: Region) -> None:
    begins, ends = found = runs_of(region)
    assert sorted(elements(found)) == sorted(indices(region))
    assert (begins < ends).all()
    # As few as there are: the storage is walked through in its own order.
    assert len(begins) == len(list(region.in_memory_order().runs()))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=8))
def test_merged_runs_are_disjoint_sorted_and_do_not_touch(runs: list[tuple[int, int]]) -> None:
    merged = merged_runs(arrays([(begin, begin + length) for begin, length in runs]))
    expected = {i for begin, length in runs for i in range(begin, begin + length)}
    assert elements(merged) == sorted(expected)
    assert (merged[0][1:] > merged[1][:-1]).all()


def test_no_runs_are_none_however_often_they_are_merged() -> None:
    assert [len(side) for side in merged_runs(NO_RUNS)] == [0, 0]
    assert [len(side) for side in runs_of(row_major((3, 0)))] == [0, 0]


def test_runs_past_the_range_of_32_bits_stay_exact() -> None:
    begins, ends = runs_of(Region(offset=5, shape=(3, 1 << 32), strides=(1 << 60, 1)))
    assert begins.tolist() == [5, (1 << 60) + 5, (1 << 61) + 5]
    assert (ends - begins).tolist() == [1 << 32] * 3


def test_region_of_more_runs_than_a_tensor_is_ever_cut_into_is_refused_before_it_is_counted() -> None:
    with pytest.raises(RegionError, match="more than 16777216 runs"):
        runs_of(Region(offset=0, shape=(1 << 30, 1 << 30), strides=(1 << 32, 2)))
