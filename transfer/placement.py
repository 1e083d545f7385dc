"""Which checkpoint regions lie in which runtime regions of a rank.

A layer's hundreds of experts are placed by a handful of patterns, each at many offsets; so a piece is a name, two
offsets and a pattern that many pieces share. Manifests stay small that way, and what a plan finds out for two patterns
holds for all pieces that have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from weightwire.transfer.errors import ManifestError
from weightwire.transfer.regions import MAX_ELEMENTS as _MOST
from weightwire.transfer.regions import Region, row_major, row_major_strides


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How a piece is walked through on both sides; offsets are left open.

    Dimensions that both sides walk through evenly are one, those of size 1 are left out, and the order is that of the
    checkpoint tensor: equal pieces have equal patterns, however a loader spelled its views.

    Attributes:
        shape: Elements along each dimension.
        checkpoint: Strides in the row-major checkpoint tensor, in elements.
        runtime: Strides in the storage of the shell, in elements.
        numel: Elements of a piece.
        checkpoint_reach: Elements from a piece's first one to behind its last one, in the checkpoint tensor.
        runtime_reach: The same in the storage.
        repeats: Whether an element of the storage may occur twice.
    """

    shape: tuple[int, ...]
    checkpoint: tuple[int, ...]
    runtime: tuple[int, ...]
    numel: int = field(init=False, compare=False)
    checkpoint_reach: int = field(init=False, compare=False)
    runtime_reach: int = field(init=False, compare=False)
    repeats: bool = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # As regions, they are checked by the rules for regions.
        there, here = (Region(offset=0, shape=self.shape, strides=side) for side in (self.checkpoint, self.runtime))
        object.__setattr__(self, "numel", math.prod(self.shape))
        object.__setattr__(self, "checkpoint_reach", there.end)
        object.__setattr__(self, "runtime_reach", here.end)
        object.__setattr__(self, "repeats", here.overlaps_itself)
        object.__setattr__(self, "_hash", hash((self.shape, self.checkpoint, self.runtime)))

    def __hash__(self) -> int:
        # Kept, since a pattern is looked up once for each of thousands of pieces.
        return self._hash

    @classmethod
    def of(cls, checkpoint: Region, runtime: Region) -> Pattern:
        """The pattern of two regions of one shape."""
        return _pattern_of(checkpoint.shape, checkpoint.strides, runtime.strides)

    def to_json(self) -> list[object]:
        return [list(self.shape), list(self.checkpoint), list(self.runtime)]

    @classmethod
    def from_json(cls, value: object) -> Pattern:
        """The inverse of `to_json`.

        Raises:
            TransferError: If `value` is no pattern in its canonical form.
        """
        match value:
            case [list(shape), list(checkpoint), list(runtime)]:
                there = Region.from_json([0, shape, checkpoint])
                here = Region.from_json([0, shape, runtime])
                found = cls(shape=there.shape, checkpoint=there.strides, runtime=here.strides)
                if found == cls.of(there, here):
                    return found
        raise ManifestError(f"pattern {value!r:.200}: expected [sizes, strides, strides] with no dimension to spare")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPiece:
    """One copy that a weight loader makes: `runtime <- checkpoint`, element for element.

    Attributes:
        name: Checkpoint name (global, unsharded).
        checkpoint_offset: First element in the row-major checkpoint tensor.
        runtime_offset: First element in the storage that the runtime tensor lies in.
        pattern: Where the others are.
    """

    name: str
    checkpoint_offset: int
    runtime_offset: int
    pattern: Pattern

    def __post_init__(self) -> None:
        pattern, there, here = self.pattern, self.checkpoint_offset, self.runtime_offset
        if there < 0 or here < 0 or there + pattern.checkpoint_reach > _MOST or here + pattern.runtime_reach > _MOST:
            raise ManifestError(
                f"placement of {self.name!r}: begins at element {there} of the tensor and at {here} of the storage, "
                "expected 0 or more, and its end below 2^63"
            )

    @classmethod
    def of(cls, name: str, *, checkpoint: Region, runtime: Region) -> PlacedPiece:
        """`runtime <- checkpoint`, as two regions of equal shape.

        Raises:
            ManifestError: If the shapes differ.
        """
        if checkpoint.shape != runtime.shape:
            raise ManifestError(
                f"placement of {name!r}: shape {list(checkpoint.shape)} in the checkpoint, "
                f"{list(runtime.shape)} in the shell, expected equal shapes"
            )
        return cls(
            name=name,
            checkpoint_offset=checkpoint.offset,
            runtime_offset=runtime.offset,
            pattern=Pattern.of(checkpoint, runtime),
        )

    @property
    def numel(self) -> int:
        return self.pattern.numel

    @property
    def ends(self) -> tuple[int, int]:
        """One past the last element, in the checkpoint tensor and in the storage."""
        return (
            self.checkpoint_offset + self.pattern.checkpoint_reach,
            self.runtime_offset + self.pattern.runtime_reach,
        )

    @property
    def checkpoint(self) -> Region:
        """Its elements in the row-major checkpoint tensor."""
        return Region(offset=self.checkpoint_offset, shape=self.pattern.shape, strides=self.pattern.checkpoint)

    @property
    def runtime(self) -> Region:
        """Its elements in the storage, in the same order as `checkpoint`."""
        return Region(offset=self.runtime_offset, shape=self.pattern.shape, strides=self.pattern.runtime)

    def shifted(self, distance: int) -> PlacedPiece:
        """The piece in a storage that begins `distance` elements earlier."""
        return PlacedPiece(
            name=self.name,
            checkpoint_offset=self.checkpoint_offset,
            runtime_offset=self.runtime_offset + distance,
            pattern=self.pattern,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedConstant:
    """Elements of a shell that hold one value and come from no checkpoint, such as padding.

    Attributes:
        runtime: Elements of the storage.
        value: In the shell's dtype after conversion as torch's `fill_` does it.
    """

    runtime: Region
    value: float = field(compare=False)
    _text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # There are many NaNs; and the zeros of both signs are equal, but their bytes are not.
        if math.isnan(self.value):
            raise ManifestError("constant: is NaN, expected a number or an infinity")
        if self.runtime.overlaps_itself:
            raise ManifestError(f"constant over {self.runtime.to_json()}: overlaps itself, expected each element once")
        object.__setattr__(self, "_text", self.value.hex())

    def to_json(self) -> list[object]:
        return [self.runtime.to_json(), self._text]

    @classmethod
    def from_json(cls, value: object) -> PlacedConstant:
        """The inverse of `to_json`.

        Raises:
            TransferError: If `value` is not `[region, hexadecimal float]` as Python's `float.hex` writes it.
        """
        match value:
            case [region, str(text)]:
                try:
                    number = float.fromhex(text)
                except (ValueError, OverflowError):
                    number = math.nan
                if number.hex() == text:
                    return cls(runtime=Region.from_json(region), value=number)
        raise ManifestError(f"constant {value!r:.200}: expected [region, float in hexadecimal]")

    def shifted(self, distance: int) -> PlacedConstant:
        """The constant in a storage that begins `distance` elements earlier."""
        return PlacedConstant(runtime=self.runtime.shifted(distance), value=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellPlacement:
    """What is to lie in one shell: disjoint, and nothing outside of it. Empty where it is not known."""

    pieces: tuple[PlacedPiece, ...] = ()
    constants: tuple[PlacedConstant, ...] = ()


def place_whole(name: str, runtime: Region) -> tuple[PlacedPiece, ...]:
    """The placement of a runtime tensor that is one whole checkpoint tensor, unsharded."""
    return (PlacedPiece.of(name, checkpoint=row_major(runtime.shape), runtime=runtime),)


def is_whole(name: str, runtime: Region, placement: Sequence[PlacedPiece]) -> bool:
    """Whether a placement says that a tensor is the checkpoint's of the same name, all of it and nothing else."""
    if len(placement) != 1 or placement[0].name != name:
        return False
    piece = placement[0]
    return (piece.checkpoint_offset, piece.runtime_offset, piece.numel) == (0, runtime.offset, runtime.numel) and (
        piece.pattern == _pattern_of(runtime.shape, row_major_strides(runtime.shape), runtime.strides)
    )


@lru_cache(maxsize=1 << 12)
def _pattern_of(sizes: tuple[int, ...], checkpoint: tuple[int, ...], runtime: tuple[int, ...]) -> Pattern:
    """Equal patterns are one object as long as they are in use: they are compared far more often than made."""
    walks = [walk for walk in zip(sizes, checkpoint, runtime, strict=True) if walk[0] != 1]
    if any(size == 0 for size, _, _ in walks):
        return Pattern(shape=(0,), checkpoint=(1,), runtime=(1,))
    walks.sort(key=lambda walk: (-walk[1], -walk[2]))
    merged: list[tuple[int, int, int]] = []
    for size, there, here in walks:
        if merged and merged[-1][1:] == (size * there, size * here):
            merged[-1] = (merged[-1][0] * size, there, here)
        else:
            merged.append((size, there, here))
    shape, there_strides, here_strides = zip(*merged, strict=True) if merged else ((), (), ())
    return Pattern(shape=shape, checkpoint=there_strides, runtime=here_strides)
