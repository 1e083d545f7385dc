"""Sets of integers as sorted, disjoint, half-open intervals: how coverage is counted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


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
