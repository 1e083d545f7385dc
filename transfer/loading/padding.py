"""Cuts of one axis, in plain integers: what a rank takes of it, where that goes, and what of its shell stays zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightwire.transfer.errors import TopologyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One part of one axis: `shell[at : at + length] = part[begin : begin + length]`, zeros up to `at + width`.

    Attributes:
        at: Where the part begins in the shell, in elements.
        width: Elements of the shell that belong to the part, padding included.
        begin: First element taken of the part of the checkpoint tensor.
        length: Elements taken; the remaining `width - length` are zero.
        size: Elements of the whole part in the checkpoint, over all ranks.
    """

    at: int = 0
    width: int
    begin: int
    length: int
    size: int

    def __post_init__(self) -> None:
        if min(self.at, self.begin, self.length) < 0 or self.length > self.width or self.end > self.size:
            raise ValueError(f"{self}: reaches outside of the shell or of the tensor")

    @property
    def end(self) -> int:
        """One past the last element taken of the part."""
        return self.begin + self.length


def clipped(offset: int, width: int, *, size: int, at: int = 0) -> Cut:
    """`width` elements from `offset`, as far as the tensor has them (L99)."""
    begin = min(offset, size)
    return Cut(at=at, width=width, begin=begin, length=min(width, size - begin), size=size)


def whole(width: int, *, at: int = 0) -> Cut:
    """All of a part that was cut for this rank before (L113)."""
    return Cut(at=at, width=width, begin=0, length=width, size=width)


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is not below `count`."""
    return -(-count // multiple) * multiple


def equal_share(size: int, parts: int, *, of: str) -> int:
    """`size / parts`.

    Raises:
        TopologyError: If that is no integer; `of` says what was to be shared.
    """
    if size % parts:
        raise TopologyError(
            f"{of}: {size} over {parts} ranks leaves {size % parts}, expected a size that {parts} divides"
        )
    return size // parts


def in_elements(values: int, packing: int, *, of: str) -> int:
    """Elements that hold `values` logical values, `packing` in each.

    Raises:
        TopologyError: If a border lies inside an element: a packed value cannot be cut off.
    """
    if values % packing:
        raise TopologyError(f"{of}: value {values} lies inside a packed element, expected a multiple of {packing}")
    return values // packing


def proportional_parts(sizes: Sequence[int], rows: int) -> tuple[int, ...]:
    """How many of a tensor's `rows` belong to each part, the parts being declared with padding (L116).

    Args:
        sizes: Declared part sizes, padding included.
        rows: Rows that the checkpoint tensor has, all parts together.

    Returns:
        Parts in the proportions of `sizes` that sum to `rows`; `sizes` itself where nothing is padded.

    Raises:
        TopologyError: If a part would not be a whole number of rows.
    """
    total = sum(sizes)
    if total <= rows:
        return tuple(sizes)
    broken = [size for size in sizes if size * rows % total]
    if broken:
        raise TopologyError(
            f"parts {list(sizes)}: {rows} rows do not split in these proportions "
            f"({broken[0]} x {rows} is no multiple of {total}), expected the real part sizes"
        )
    return tuple(size * rows // total for size in sizes)
