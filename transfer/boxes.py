"""Boxes in a checkpoint tensor's own coordinates: where two ranks' pieces of it meet.

A placement says which elements of a storage hold which elements of a checkpoint tensor, both as strided regions. In the
tensor's coordinates such a region is nearly always a box: a range along each axis, perhaps with axes in another order.
Two boxes meet in a box, however the ranks were cut; composed with the placements of both sides it becomes one copy from
storage to storage. What is no box is not described here (`Box.of` gives None) and goes another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.regions import Region, row_major_strides


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A range along each axis of a tensor, none of them empty.

    Attributes:
        begins: First index along each axis.
        sizes: Number of indices along each axis.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    def meet(self, other: Box) -> Box | None:
        """The indices that are in both boxes; None if there are none."""
        begins = tuple(map(max, self.begins, other.begins))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.begins, self.sizes, other.begins, other.sizes, strict=True)
        ]
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return None if min(sizes, default=1) <= 0 else Box(begins=begins, sizes=sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxedPiece:
    """A placed piece whose part of the checkpoint tensor is a box.

    Attributes:
        name: Checkpoint name.
        box: In the tensor's coordinates.
        offset: Element of the storage that holds the box's first element.
        strides: How far apart neighbours along each axis of the tensor lie in the storage.
    """

    name: str
    box: Box
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, piece: PlacedPiece, shape: Sequence[int]) -> BoxedPiece | None:
        """The piece in coordinates of a tensor of `shape`; None if its part is no box, or is empty.

        Args:
            piece: Its checkpoint region lies over the row-major tensor.
            shape: Of the checkpoint tensor, in elements.
        """
        if not piece.checkpoint.numel:
            return None
        begins = _indices(piece.checkpoint.offset, shape)
        if begins is None:
            return None
        sizes, strides = [1] * len(shape), [0] * len(shape)
        for size, step, runtime in zip(
            piece.checkpoint.shape, piece.checkpoint.strides, piece.runtime.strides, strict=True
        ):
            if size > 1 and not _spread(sizes, strides, _Walk(size, step, runtime), shape):
                return None
        box = Box(begins=begins, sizes=tuple(sizes))
        if any(begin + size > whole for begin, size, whole in zip(begins, sizes, shape, strict=True)):
            return None
        return cls(name=piece.name, box=box, offset=piece.runtime.offset, strides=tuple(strides))

    def region(self, box: Box) -> Region:
        """Where a part of this piece lies in the storage; `box` is inside `self.box`."""
        steps = zip(box.begins, self.box.begins, self.strides, strict=True)
        offset = self.offset + sum((begin - first) * stride for begin, first, stride in steps)
        return Region(offset=offset, shape=box.sizes, strides=self.strides)


@dataclass(frozen=True, slots=True)
class _Walk:
    """One dimension of a piece: so many steps, in the checkpoint tensor and in the storage."""

    size: int
    step: int
    runtime: int


def _spread(sizes: list[int], strides: list[int], walk: _Walk, shape: Sequence[int]) -> bool:
    """Put one dimension of a region on the axes of the tensor that it walks along; False if it walks along none.

    A region may have merged neighbouring axes into one dimension, as long as all but the outermost are whole.
    """
    left, step, runtime = walk.size, walk.step, walk.runtime
    whole = row_major_strides(shape)
    while left > 1:
        axis = next((i for i, stride in enumerate(whole) if stride == step and shape[i] > 1), None)
        if axis is None or sizes[axis] > 1:
            return False
        inner = shape[axis]
        if left <= inner:
            sizes[axis], strides[axis] = left, runtime
            return True
        if left % inner:
            return False
        sizes[axis], strides[axis] = inner, runtime
        left, step, runtime = left // inner, step * inner, runtime * inner
    return True


def _indices(offset: int, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Coordinates of the element at `offset` of a row-major tensor; None if it lies outside."""
    found = list[int]()
    for size in reversed(shape):
        if not size:
            return None
        offset, index = divmod(offset, size)
        found.append(index)
    return None if offset else tuple(reversed(found))
