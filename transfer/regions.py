"""Strided N-d boxes over flat storages: the one way in which this project says "these elements".

A region holds no storage and no dtype. It is in elements wherever tensors are meant, and in bytes on the wire
(`Region.in_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from weightwire.transfer.errors import RegionError

# Torch and C agree on signed 64-bit sizes; nothing beyond can be addressed.
MAX_ELEMENTS = 2**63 - 1
# Numpy's limit. Without one, a short text could name sizes whose product takes minutes.
MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of elements over a flat storage, in row-major order of `shape`.

    Attributes:
        offset: Index of the first element in the storage.
        shape: Elements along each dimension; `()` is one element.
        strides: Distance between neighbours along each dimension, never negative. 0 repeats an element.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_DIMENSIONS:
            raise RegionError(f"region: {len(self.shape)} dimensions, expected at most {MAX_DIMENSIONS}")
        if len(self.shape) != len(self.strides):
            raise RegionError(f"region: {len(self.shape)} sizes and {len(self.strides)} strides, expected as many")
        if self.offset < 0 or min((0, *self.shape, *self.strides)) < 0:
            raise RegionError(f"region {self.to_json()}: negative offset, size or stride")
        # A size or stride that counts for nothing still has to be one that torch can be told.
        if max(self.end, self.numel, *self.shape, *self.strides) > MAX_ELEMENTS:
            raise RegionError(f"region {self.to_json()}: reaches past 2^63 elements")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past the highest element index; `offset` for a region without elements."""
        # Runs first, since they are what is asked for most.
        if self.strides == (1,):
            return self.offset + self.shape[0]
        if 0 in self.shape:
            return self.offset
        last = self.offset
        for size, stride in zip(self.shape, self.strides, strict=True):
            last += (size - 1) * stride
        return last + 1

    @property
    def is_contiguous(self) -> bool:
        """True if the elements, in row-major order, are one run without gaps."""
        if 0 in self.shape:
            return True
        expected = 1
        # By hand, innermost first: this is asked for every copy of a plan.
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def is_dense(self) -> bool:
        """True if, in whatever order, it has every element from its first to its last, each once."""
        return self.end - self.offset == self.numel and not self.overlaps_itself

    @property
    def overlaps_itself(self) -> bool:
        """True unless it is certain that no element occurs twice: each stride steps over all smaller ones."""
        if 0 in self.shape:
            return False
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += stride * (size - 1)
        return False

    def coalesced(self) -> Region:
        """The same elements in the same order with as few dimensions as possible.

        Dimensions of size 1 vanish, neighbours that walk on evenly are merged; no elements gives shape `(0,)`.
        """
        if len(self.shape) == 1 and self.shape[0] > 1:
            return self
        if self.numel == 0:
            return Region(offset=self.offset, shape=(0,), strides=(1,))
        shape: list[int] = []
        strides: list[int] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if shape and strides[-1] == size * stride:
                shape[-1] *= size
                strides[-1] = stride
            else:
                shape.append(size)
                strides.append(stride)
        return Region(offset=self.offset, shape=tuple(shape), strides=tuple(strides))

    def in_memory_order(self) -> Region:
        """The same elements in the order of the storage, coalesced, unless some occur more than once."""
        order = sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis])
        shape, strides = (tuple(side[axis] for axis in order) for side in (self.shape, self.strides))
        return Region(offset=self.offset, shape=shape, strides=strides).coalesced()

    def contains(self, other: Region) -> bool:
        """Whether every element of `other` is one of this region.

        Counts in steps of this region's own strides, largest first, which is exact because no region of a tensor
        overlaps itself; one that does is refused.

        Raises:
            RegionError: If this region overlaps itself.
        """
        if self.overlaps_itself:
            raise RegionError(f"region {self.to_json()}: overlaps itself, expected each element once")
        mine = self.in_memory_order()
        steps = [(stride, size) for size, stride in zip(mine.shape, mine.strides, strict=True)]
        return all(_holds_run(mine.offset, steps, run) for run in other.in_memory_order().runs())

    def runs(self) -> Iterator[tuple[int, int]]:
        """The contiguous runs `(start, length)` in row-major order, none of them empty."""
        flat = self.coalesced()
        if flat.numel == 0:
            return
        length = 1
        if flat.shape and flat.strides[-1] == 1:
            length = flat.shape[-1]
            flat = Region(offset=flat.offset, shape=flat.shape[:-1], strides=flat.strides[:-1])
        for start in _walk(flat.offset, flat.shape, flat.strides):
            yield start, length

    def packed(self, begin: int, end: int) -> Iterator[Region]:
        """The boxes that hold elements `begin` to `end` of the row-major order, in that order.

        At most two partial boxes for each dimension and a whole one in the middle, however large the region is.
        """
        if not 0 <= begin <= end <= self.numel:
            raise RegionError(f"region {self.to_json()}: elements {begin} to {end} of {self.numel}")
        if begin == end:
            return
        if (begin, end) == (0, self.numel):
            yield self
            return
        row = math.prod(self.shape[1:])
        first, last = begin // row, (end - 1) // row
        if first == last:
            yield from self._rows(first, None).packed(begin - first * row, end - first * row)
            return
        if begin % row:
            yield from self._rows(first, None).packed(begin % row, row)
            first += 1
        whole_end = end // row
        if first < whole_end:
            yield self._rows(first, whole_end)
        if end % row:
            yield from self._rows(whole_end, None).packed(0, end % row)

    def _rows(self, begin: int, end: int | None) -> Region:
        """Rows `begin` to `end` along the first dimension, or one row without that dimension."""
        shape = self.shape[1:] if end is None else (end - begin, *self.shape[1:])
        strides = self.strides[1:] if end is None else self.strides
        return Region(offset=self.offset + begin * self.strides[0], shape=shape, strides=strides)

    def in_bytes(self, itemsize: int) -> Region:
        """The same box with bytes for elements."""
        if self.is_contiguous:
            return Region(offset=self.offset * itemsize, shape=(self.numel * itemsize,), strides=(1,))
        return Region(
            offset=self.offset * itemsize,
            shape=(*self.shape, itemsize),
            strides=(*(stride * itemsize for stride in self.strides), 1),
        ).coalesced()

    def bytes_from(self, base: int, itemsize: int) -> Region:
        """As `in_bytes`, in a storage that begins at byte `base` and ends below 2^63, as the caller knows."""
        if self.is_contiguous:
            return _run(self.numel * itemsize).moved_to(base + self.offset * itemsize)
        found = self.in_bytes(itemsize)
        return found.moved_to(base + found.offset)

    def shifted(self, distance: int) -> Region:
        """The same box, `distance` elements further on."""
        offset = self.offset + distance
        if offset < 0 or self.end + distance > MAX_ELEMENTS:
            raise RegionError(
                f"region {self.to_json()}: shifted by {distance}, expected to stay between 0 and 2^63 elements"
            )
        return self.moved_to(offset)

    def moved_to(self, offset: int) -> Region:
        """The same box at an offset of which the caller knows that the box stays below 2^63 elements.

        Planning makes tens of thousands of sizes and strides that have been looked at once.
        """
        moved = object.__new__(Region)
        object.__setattr__(moved, "offset", offset)
        object.__setattr__(moved, "shape", self.shape)
        object.__setattr__(moved, "strides", self.strides)
        return moved

    def to_json(self) -> list[object]:
        return [self.offset, list(self.shape), list(self.strides)]

    @classmethod
    def from_json(cls, value: object) -> Region:
        """The inverse of `to_json`.

        Raises:
            RegionError: If `value` is not `[offset, [sizes], [strides]]` in integers, or makes no sense.
        """
        match value:
            case [int(offset), [*shape], [*strides]]:
                sizes, steps = _integers(shape), _integers(strides)
                if sizes is not None and steps is not None and type(offset) is int:
                    return cls(offset=offset, shape=sizes, strides=steps)
        raise RegionError(f"region {value!r:.200}: expected [offset, [sizes], [strides]] in integers")


@lru_cache(maxsize=1 << 12)
def _run(numel: int) -> Region:
    """Made once for each length: a model's layers have few."""
    return Region(offset=0, shape=(numel,), strides=(1,))


def _holds_run(offset: int, steps: Sequence[tuple[int, int]], run: tuple[int, int]) -> bool:
    """Whether a run of elements is one of a region in memory order: `steps` are its (stride, size), largest first."""
    at, length = run[0] - offset, run[1]
    if at < 0:
        return False
    for stride, size in steps[:-1]:
        index, at = divmod(at, stride)
        if index >= size:
            return False
    stride, size = steps[-1] if steps else (1, 1)
    index, at = divmod(at, stride)
    # Coalesced, so that behind the last element of a row there is a gap.
    return at == 0 and (index + length <= size if stride == 1 else index < size and length == 1)


def _walk(offset: int, shape: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    """Element indices in row-major order, one at a time: `itertools.product` would write each dimension out first."""
    if not shape:
        yield offset
    elif len(shape) == 1 and strides[0]:
        yield from range(offset, offset + shape[0] * strides[0], strides[0])
    else:
        for index in range(shape[0]):
            yield from _walk(offset + index * strides[0], shape[1:], strides[1:])


def _integers(values: list[object]) -> tuple[int, ...] | None:
    # `type() is`, since a JSON true would pass for an int.
    found = tuple(value for value in values if type(value) is int)
    return found if len(found) == len(values) else None


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`, as torch computes them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def row_major(shape: Sequence[int], *, offset: int = 0) -> Region:
    """The region of a contiguous tensor of `shape` that starts at element `offset`."""
    return Region(offset=offset, shape=tuple(shape), strides=row_major_strides(shape))
