"""Sets of integers as sorted, disjoint, half-open intervals: how coverage is counted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

from weightwire.transfer.regions import Region
from weightwire.transfer.runs import Runs, merged_runs, runs_of

# Up to here it is faster to add runs one by one than to make arrays of them.
_FEW_RUNS = 16


class IntervalSet:
    """Grows by `add`; intervals that touch are merged."""

    __slots__ = ("_begins", "_ends")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in intervals:
            self.add(begin, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self._begins)

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"

    @property
    def total(self) -> int:
        """How many integers are in the set."""
        return sum(self._ends) - sum(self._begins)

    def add(self, begin: int, end: int) -> None:
        """Put `[begin, end)` into the set; nothing happens if it is empty."""
        if begin >= end:
            return
        low = bisect_left(self._ends, begin)
        high = bisect_right(self._begins, end)
        if low < high:
            begin = min(begin, self._begins[low])
            end = max(end, self._ends[high - 1])
        self._begins[low:high] = [begin]
        self._ends[low:high] = [end]

    def add_region(self, region: Region) -> None:
        """Put all elements of a region into the set; thousands of rows cost little more than one."""
        if region.is_dense:
            self.add(region.offset, region.end)
            return
        begins, ends = runs_of(region)
        if len(begins) <= _FEW_RUNS:
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                self.add(begin, end)
            return
        low = bisect_left(self._ends, region.offset)
        high = bisect_right(self._begins, region.end)
        begins = np.concatenate((np.array(self._begins[low:high], dtype=np.int64), begins))
        ends = np.concatenate((np.array(self._ends[low:high], dtype=np.int64), ends))
        begins, ends = merged_runs((begins, ends))
        self._begins[low:high], self._ends[low:high] = begins.tolist(), ends.tolist()

    def covers_region(self, region: Region) -> bool:
        """True if every element of a region is in the set."""
        if not region.numel or self.covers(region.offset, region.end):
            return True
        if region.is_dense:
            return False
        begins, ends = runs_of(region)
        held = self._around(region)
        if not len(held[0]):
            return False
        at = np.searchsorted(held[0], begins, side="right") - 1
        return bool(((at >= 0) & (held[1][at] >= ends)).all())

    def touches_region(self, region: Region) -> bool:
        """True if any element of a region is in the set."""
        held = self._around(region)
        if not len(held[0]) or not region.numel:
            return False
        begins, ends = runs_of(region)
        at = np.searchsorted(held[0], ends, side="left") - 1
        return bool(((at >= 0) & (held[1][at] > begins)).any())

    def _around(self, region: Region) -> Runs:
        """The intervals that may have elements of a region."""
        low = bisect_left(self._ends, region.offset)
        high = bisect_right(self._begins, region.end)
        return np.array(self._begins[low:high], dtype=np.int64), np.array(self._ends[low:high], dtype=np.int64)

    def covers(self, begin: int, end: int) -> bool:
        """True if every integer of `[begin, end)` is in the set."""
        if begin >= end:
            return True
        at = bisect_right(self._begins, begin) - 1
        return at >= 0 and self._ends[at] >= end

    def missing(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of `[begin, end)` that are not in the set, ascending."""
        at = bisect_right(self._ends, begin)
        while begin < end:
            gap_end = min(end, self._begins[at]) if at < len(self._begins) else end
            if begin < gap_end:
                yield begin, gap_end
            if at >= len(self._ends):
                return
            begin = max(begin, self._ends[at])
            at += 1
