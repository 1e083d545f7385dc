"""Boxes in a checkpoint tensor's own coordinates: where two ranks' pieces of it meet.

A placement says which elements of a storage hold which elements of a checkpoint tensor, both as strided regions. In the
tensor's coordinates such a region is nearly always a box: a range along each axis, perhaps with axes in another order.
Two boxes meet in a box, however the ranks were cut; composed with the placements of both sides it becomes one copy from
storage to storage. What is made of no boxes is not described here (`views_of` gives None) and goes another way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from weightwire.transfer.errors import ManifestError
from weightwire.transfer.placement import Pattern, PlacedPiece
from weightwire.transfer.regions import Region, row_major, row_major_strides

# Cells of one tensor, and those of each box in them: far more than ranks of any real topology give, and soon over if
# somebody claims more.
_MOST_CELLS = 1 << 20
# Slots that one scalar is written into: as many as a layer has experts.
_MOST_REPEATS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A range along each axis of a tensor, none of them empty.

    Attributes:
        begins: First index along each axis.
        sizes: Number of indices along each axis.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index along each axis."""
        return tuple(begin + size for begin, size in zip(self.begins, self.sizes, strict=True))

    @classmethod
    def between(cls, begins: Sequence[int], ends: Sequence[int]) -> Box | None:
        """The box with these bounds; None if it is empty."""
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return None if min(sizes, default=1) <= 0 else cls(begins=tuple(begins), sizes=sizes)

    def meet(self, other: Box) -> Box | None:
        """The indices that are in both boxes; None if there are none."""
        return Box.between(tuple(map(max, self.begins, other.begins)), tuple(map(min, self.ends, other.ends)))

    def contains(self, other: Box) -> bool:
        """Whether every index of `other` is in this box."""
        return self.meet(other) == other

    def without(self, other: Box) -> Iterator[Box]:
        """The indices that are not in `other`, as disjoint boxes: at most two for each axis."""
        met = self.meet(other)
        if met is None:
            yield self
            return
        begins, ends = list(self.begins), list(self.ends)
        for axis in range(len(begins)):
            for low, high in ((begins[axis], met.begins[axis]), (met.ends[axis], ends[axis])):
                if low < high:
                    yield Box(
                        begins=(*begins[:axis], low, *begins[axis + 1 :]),
                        sizes=tuple(
                            high - low if at == axis else end - begin
                            for at, (begin, end) in enumerate(zip(begins, ends, strict=True))
                        ),
                    )
            begins[axis], ends[axis] = met.begins[axis], met.ends[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxView:
    """A box of a checkpoint tensor as it lies in a storage.

    Attributes:
        box: In the tensor's coordinates.
        offset: Element that holds the box's first one, counted from the beginning of its piece.
        strides: How far apart neighbours along each axis of the tensor lie in the storage.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]

    def region(self, box: Box) -> Region:
        """Where a part of this box lies, counted from the beginning of the piece; `box` is inside `self.box`."""
        steps = zip(box.begins, self.box.begins, self.strides, strict=True)
        offset = self.offset + sum((begin - first) * stride for begin, first, stride in steps)
        return Region(offset=offset, shape=box.sizes, strides=self.strides)


def views_of(piece: PlacedPiece, shape: Sequence[int]) -> tuple[BoxView, ...] | None:
    """The boxes that a piece consists of; None if it does not consist of boxes.

    Nearly always it is one. Elements that follow each other in the checkpoint tensor, from anywhere to anywhere, are at
    most two boxes for each axis and one in the middle; elements that come again are a box each time.

    Args:
        piece: Its checkpoint region lies in the row-major tensor.
        shape: Of the checkpoint tensor, in elements.
    """
    pattern, begin = piece.pattern, piece.checkpoint_offset
    if not pattern.numel or begin + pattern.checkpoint_reach > math.prod(shape):
        return () if not pattern.numel else None
    if 0 in pattern.checkpoint:
        return _views_again(piece, pattern.checkpoint.index(0), shape)
    view = _view_of(pattern, begin, shape)
    if view is not None:
        return (view,)
    if len(pattern.shape) != 1 or pattern.checkpoint != (1,):
        return None
    found: list[BoxView] = []
    at = 0
    for part in row_major(shape).packed(begin, begin + pattern.numel):
        walk = Pattern(shape=(part.numel,), checkpoint=(1,), runtime=pattern.runtime)
        view = _view_of(walk, begin + at, shape)
        assert view is not None, "a part that was cut at the axes is a box"
        found.append(BoxView(box=view.box, offset=at * pattern.runtime[0], strides=view.strides))
        at += part.numel
    return tuple(found)


def _views_again(piece: PlacedPiece, axis: int, shape: Sequence[int]) -> tuple[BoxView, ...] | None:
    """The boxes of a piece that has the same elements again and again along one of its dimensions, such as a scale."""
    pattern = piece.pattern
    sizes, there, here = (
        side[:axis] + side[axis + 1 :] for side in (pattern.shape, pattern.checkpoint, pattern.runtime)
    )
    once = Pattern(shape=sizes, checkpoint=there, runtime=here)
    times, step = pattern.shape[axis], pattern.runtime[axis]
    views = views_of(replace(piece, pattern=once), shape)
    if views is None or len(views) * times > _MOST_REPEATS or not step:
        return None
    return tuple(replace(view, offset=view.offset + at * step) for at in range(times) for view in views)


def cells(box: Box, held: Sequence[Box]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cut a box so that each part lies in each of the others wholly or not at all.

    Args:
        box: To be cut.
        held: Boxes of the same tensor.

    Returns:
        Disjoint parts that make up `box`, each with the numbers of the boxes that it lies in; perhaps none.

    Raises:
        ManifestError: If it would come to millions of parts.
    """
    met = [(number, part) for number, other in enumerate(held) if (part := box.meet(other)) is not None]
    cuts = [
        sorted({begin, end, *(bound for _, part in met for bound in (part.begins[axis], part.ends[axis]))})
        for axis, (begin, end) in enumerate(zip(box.begins, box.ends, strict=True))
    ]
    at = [{cut: number for number, cut in enumerate(bounds)} for bounds in cuts]
    spans = [
        [range(of[low], of[high]) for of, low, high in zip(at, part.begins, part.ends, strict=True)] for _, part in met
    ]
    count = math.prod(len(bounds) - 1 for bounds in cuts)
    if count + sum(math.prod(map(len, span)) for span in spans) > _MOST_CELLS:
        raise ManifestError(f"placements: {len(met)} pieces cut a tensor into {count} parts, expected far fewer")
    members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for (number, _), span in zip(met, spans, strict=True):
        for place in product(*span):
            members[place].append(number)
    found = list[tuple[Box, tuple[int, ...]]]()
    for place in product(*(range(len(bounds) - 1) for bounds in cuts)):
        begins, ends = (tuple(bounds[i + more] for i, bounds in zip(place, cuts, strict=True)) for more in (0, 1))
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        found.append((Box(begins=begins, sizes=sizes), tuple(members.get(place, ()))))
    return found


@dataclass(frozen=True, slots=True)
class _Walk:
    """One dimension of a piece: so many steps, in the checkpoint tensor and in the storage."""

    size: int
    step: int
    runtime: int


def _view_of(pattern: Pattern, begin: int, shape: Sequence[int]) -> BoxView | None:
    begins = _indices(begin, shape)
    if begins is None:
        return None
    sizes, strides = [1] * len(shape), [0] * len(shape)
    for walk in map(_Walk, pattern.shape, pattern.checkpoint, pattern.runtime):
        if not _spread(sizes, strides, walk, shape):
            return None
    box = Box(begins=begins, sizes=tuple(sizes))
    if any(end > whole for end, whole in zip(box.ends, shape, strict=True)):
        return None
    return BoxView(box=box, offset=0, strides=tuple(strides))


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
