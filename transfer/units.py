"""The parts that a plan is dealt out in: what is still needed of them, who sends which, and how they become copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.plan import Copy
from weightwire.transfer.regions import Region

# What several sources hold is cut so that each gives its share, but not into pieces that are not worth a request.
_LEAST_CUT_BYTES = 1 << 16


class Unit(NamedTuple):
    """Bytes of one target tensor that each of its holders has.

    Attributes:
        tensor: Runtime name.
        target: Flat region of the target.
        begin: First byte of it, in its row-major order, that has to come.
        end: One past the last.
        holders: For each source that has it, its number and the flat region there.
    """

    tensor: str
    target: Region
    begin: int
    end: int
    holders: tuple[tuple[int, Region], ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def copies(self, source: Region) -> Sequence[Copy]:
        """From one of the holders."""
        if self.begin == 0 and self.end == self.target.numel:
            return (Copy(source=source, target=self.target),)
        return list(_paired(source, self.target, self.begin, self.end))


def missing_positions(region: Region, begin: int, end: int, covered: IntervalSet) -> Iterator[tuple[int, int]]:
    """Positions `begin` to `end` of a region whose bytes are not covered, as intervals.

    A strided region is halved until each part is covered wholly or not at all; what was fetched before ended at rows.
    """
    last: tuple[int, int] | None = None
    at = begin
    for part in region.packed(begin, end):
        for low, high in _gaps(part, covered):
            if last is not None and last[1] == at + low:
                last = (last[0], at + high)
                continue
            if last is not None:
                yield last
            last = (at + low, at + high)
        at += part.numel
    if last is not None:
        yield last


def _gaps(region: Region, covered: IntervalSet) -> Iterator[tuple[int, int]]:
    if region.is_contiguous:
        for low, high in covered.missing(region.offset, region.offset + region.numel):
            yield low - region.offset, high - region.offset
        return
    # Looked at as a whole: the rows of its neighbours lie in between, so that each row would be a gap.
    if not covered.touches_region(region):
        yield 0, region.numel
    elif not covered.covers_region(region):
        half = region.shape[0] // 2 * (region.numel // region.shape[0]) or region.numel // 2
        for begin, end in ((0, half), (half, region.numel)):
            at = begin
            for part in region.packed(begin, end):
                for low, high in _gaps(part, covered):
                    yield at + low, at + high
                at += part.numel


def _paired(source: Region, target: Region, begin: int, end: int) -> Iterator[Copy]:
    """Copies of positions `begin` to `end` of two regions of equal `numel`, each of them one box on both sides."""
    while begin < end:
        stop = end
        while True:
            ours, theirs = next(target.packed(begin, stop)), next(source.packed(begin, stop))
            if ours.numel == theirs.numel:
                break
            stop = begin + min(ours.numel, theirs.numel)
        yield Copy(source=theirs, target=ours)
        begin += ours.numel


def dealt(units: Sequence[Unit], shares: Mapping[int, int]) -> Iterator[tuple[Unit, int]]:
    """Deal units to their holders in order, cutting one where a share ends, if the parts are worth it.

    What one holder gets too much or too little, since no cut is just where a share ends, the next one makes up for.
    """
    left = dict(shares)
    order = list(left)
    for unit in units:
        while len(order) > 1 and left[order[0]] < unit.nbytes:
            cut = _cut_at(unit, left[order[0]])
            if cut is not None:
                yield unit._replace(end=cut), order[0]
                left[order[0]] -= cut - unit.begin
                unit = unit._replace(begin=cut)
            elif left[order[0]] * 2 >= unit.nbytes:
                break
            _hand_on(left, order)
        yield unit, order[0]
        left[order[0]] -= unit.nbytes
        if len(order) > 1 and left[order[0]] <= 0:
            _hand_on(left, order)


def _hand_on(left: dict[int, int], order: list[int]) -> None:
    rest = left[order.pop(0)]
    left[order[0]] += rest


def _cut_at(unit: Unit, nbytes: int) -> int | None:
    """The position, at a row of the target, that leaves about `nbytes` before it; None if a part would be too small."""
    row = 1 if unit.target.is_contiguous else unit.target.numel // unit.target.shape[0]
    step = row * max(1, _LEAST_CUT_BYTES // row)
    cut = (unit.begin + nbytes) // step * step
    if cut - unit.begin < _LEAST_CUT_BYTES or unit.end - cut < _LEAST_CUT_BYTES:
        return None
    return cut


def merged(copies: list[Copy]) -> Iterator[Copy]:
    """Sorted by the source's flat space; contiguous copies that continue each other on both sides become one."""
    last: Copy | None = None
    for copy in sorted(copies, key=lambda copy: copy.source.offset):
        if last is not None and _continues(last, copy):
            nbytes = last.nbytes + copy.nbytes
            last = Copy(source=run(last.source.offset, nbytes), target=run(last.target.offset, nbytes))
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _continues(last: Copy, copy: Copy) -> bool:
    # The ends first: they differ nearly always.
    return (
        last.target.end == copy.target.offset
        and last.source.end == copy.source.offset
        and last.is_contiguous
        and copy.is_contiguous
    )


def run(begin: int, nbytes: int) -> Region:
    return Region(offset=begin, shape=(nbytes,), strides=(1,))
