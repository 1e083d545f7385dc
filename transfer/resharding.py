"""Where the pieces of a target tensor can be had: composition of the placements of both sides.

`target region <- checkpoint box, checkpoint box -> source region`, for any pair of topologies. What two placements have
in common depends on their patterns alone, not on the layer or the expert, so it is found out once for each combination
of patterns and then only shifted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from weightwire.transfer.agreement import check_placement
from weightwire.transfer.boxes import Box, BoxView, cells, views_of
from weightwire.transfer.demand import HeldKinds, Kind
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import ManifestError
from weightwire.transfer.manifest import Manifest, TensorEntry
from weightwire.transfer.placement import Pattern, PlacedPiece
from weightwire.transfer.regions import Region, row_major_strides

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


class Portion(NamedTuple):
    """A part of a target piece that every one of its holders has, or that nobody has.

    Attributes:
        target: Flat region of the target, in bytes.
        holders: For each source that has it, its number and the flat region there, in bytes.
        checkpoint: Elements of the row-major checkpoint tensor, in the same order.
        runtime: The same elements of the target's storage, counted from the beginning of the piece.
    """

    target: Region
    holders: tuple[tuple[int, Region], ...]
    checkpoint: Region
    runtime: Region


# Of all tensors, each pair of patterns once: real models have thousands.
_MOST_CELLS = 1 << 21


# A piece that a source has: the number of the source, the flat byte of the piece's first element, and the number of its
# kind, which is its pattern at its place in the checkpoint tensor. A plain tuple: there are hundreds of thousands.
_Held = tuple[int, int, int]


class _Template(NamedTuple):
    """A portion before it is shifted to where a piece lies; `holders` are positions in the list of held pieces."""

    target: Region
    holders: tuple[tuple[int, Region], ...]
    checkpoint: Region
    runtime: Region


class PlacedSources:
    """All that the sources hold by placement, by checkpoint name."""

    def __init__(self, sources: Sequence[Manifest]) -> None:
        """Args:
        sources: Of one model and revision.

        Raises:
            ManifestError: If a source places two things into one place, or two of them know a tensor in two shapes.
        """
        self._shapes = shapes_of(sources)
        # By dtype and name: elements of unlike dtypes are never copied onto each other.
        self._held: defaultdict[str, defaultdict[str, list[_Held]]] = defaultdict(lambda: defaultdict(list))
        self._kinds: dict[tuple[Pattern, int], int] = {}
        self._templates: dict[object, list[_Template] | None] = {}
        self._views: dict[object, tuple[BoxView, ...] | None] = {}
        self._num_cells = 0
        for number, source in enumerate(sources):
            self._add(number, source)
        self._patterns = list(self._kinds)

    def _add(self, number: int, source: Manifest) -> None:
        aliases: set[tuple[int, int, Shape, Shape, str]] = set()
        kinds, last, at, kind = self._kinds, None, -1, -1
        whole = source.whole
        for tensor in source.tensors:
            # After post-processing the elements are not the checkpoint's any more.
            if tensor.state != "placed" or not tensor.placement:
                continue
            alias = (tensor.storage, tensor.offset, tensor.shape, tensor.strides, tensor.dtype)
            if alias in aliases:
                continue
            aliases.add(alias)
            # A whole tensor is one piece, that of all its elements.
            if tensor.name not in whole:
                check_placement(source, tensor)
            base, itemsize, held = source.storage_bases[tensor.storage], tensor.itemsize, self._held[tensor.dtype]
            for piece in tensor.placement:
                if piece.pattern is not last or piece.checkpoint_offset != at:
                    last, at = piece.pattern, piece.checkpoint_offset
                    kind = kinds.setdefault((last, at), len(kinds))
                held[piece.name].append((number, base + piece.runtime_offset * itemsize, kind))

    def dtypes_of(self, name: str) -> list[str]:
        """In which dtypes the sources have a checkpoint tensor."""
        return [dtype for dtype in sorted(BY_NAME) if name in self._held.get(dtype, ())]

    def portions(
        self, target: Manifest, tensor: TensorEntry, shapes: Shapes
    ) -> Iterator[tuple[PlacedPiece, list[Portion] | None]]:
        """The pieces of a target tensor, each cut so that every part is held by the same sources throughout.

        Args:
            target: Has `tensor`.
            tensor: Placed.
            shapes: Of the checkpoint tensors, as the target knows them.

        Yields:
            Each piece with its parts, the parts that no source has among them; None if it is made of no boxes, or its
            tensor's shape is not known.

        Raises:
            ManifestError: If the sources know a tensor in another shape.
        """
        itemsize, offered = tensor.itemsize, self._held[tensor.dtype]
        base = target.storage_bases[tensor.storage]
        for piece in tensor.placement:
            held = offered.get(piece.name, [])
            shape = self._shape_of(piece.name, target, shapes)
            templates = None if shape is None else self._templates_of(piece, held, (shape, itemsize))
            if templates is None:
                yield piece, None
                continue
            shift = base + piece.runtime_offset * itemsize
            yield (
                piece,
                [
                    # Both ends lie in storages, whose sizes the manifests have been checked against.
                    Portion(
                        here.moved_to(here.offset + shift),
                        _placed(holders, held),
                        checkpoint,
                        runtime,
                    )
                    for here, holders, checkpoint, runtime in templates
                ],
            )

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of the checkpoint tensors, as the sources know them."""
        return self._shapes

    @cached_property
    def held_kinds(self) -> HeldKinds:
        """What exactly each set of sources holds, each element once."""
        found: defaultdict[tuple[Kind, str], Counter[tuple[int, ...]]] = defaultdict(Counter)
        known: dict[object, list[tuple[tuple[int, ...], int]]] = {}
        for dtype, by_name in self._held.items():
            itemsize = BY_NAME[dtype].itemsize
            for name, held in by_name.items():
                shape = self._shapes.get(name)
                if shape is None:
                    continue
                key = (shape, *[(source, kind) for source, _, kind in held])
                if key not in known:
                    known[key] = self._held_parts(shape, held)
                sets = found[Kind.of(name, shape), dtype]
                for holders, numel in known[key]:
                    sets[holders] += numel * itemsize
        return found

    def _held_parts(self, shape: Shape, held: Sequence[_Held]) -> list[tuple[tuple[int, ...], int]]:
        """The elements of one checkpoint tensor by the set of sources that hold them."""
        offered = [
            (source, view) for source, _, kind in held for view in self._views_of(*self._patterns[kind], shape) or ()
        ]
        found: defaultdict[tuple[int, ...], int] = defaultdict(int)
        if 0 not in shape:
            for part, members in self._cells(_whole(shape).box, [view.box for _, view in offered]):
                found[tuple(sorted({offered[member][0] for member in members}))] += math.prod(part.sizes)
        return [(holders, numel) for holders, numel in found.items() if holders]

    def _shape_of(self, name: str, target: Manifest, shapes: Shapes) -> Shape | None:
        theirs, ours = self._shapes.get(name), shapes.get(name)
        if theirs is not None and ours is not None and theirs != ours:
            raise ManifestError(
                f"checkpoint tensor {name!r}: has shape {list(theirs)} for the sources and, for rank {target.rank} of "
                f"model {target.model!r}, {list(ours)}",
                tensor=name,
                model=target.model,
                rank=target.rank,
            )
        return ours if theirs is None else theirs

    def _templates_of(
        self, piece: PlacedPiece, held: Sequence[_Held], facts: tuple[Shape, int]
    ) -> list[_Template] | None:
        # All that decides what two placements have in common.
        key = (piece.pattern, piece.checkpoint_offset, facts, *[kind for _, _, kind in held])
        if key not in self._templates:
            self._templates[key] = self._compose(piece, held, facts)
        return self._templates[key]

    def _compose(self, piece: PlacedPiece, held: Sequence[_Held], facts: tuple[Shape, int]) -> list[_Template] | None:
        shape, itemsize = facts
        wanted = self._views_of(piece.pattern, piece.checkpoint_offset, shape)
        if wanted is None:
            return None
        # Positions in `held` with the boxes that each consists of; a piece of no boxes cannot be composed with.
        offered = [
            (position, view)
            for position, (_, _, kind) in enumerate(held)
            for view in self._views_of(*self._patterns[kind], shape) or ()
        ]
        found: list[_Template] = []
        for view in wanted:
            for part, members in self._cells(view.box, [other.box for _, other in offered]):
                holders = {offered[member][0]: offered[member][1].region(part) for member in members}
                runtime = view.region(part)
                found.append(
                    _Template(
                        target=runtime.in_bytes(itemsize),
                        holders=tuple((position, region.in_bytes(itemsize)) for position, region in holders.items()),
                        checkpoint=_whole(shape).region(part),
                        runtime=runtime,
                    )
                )
        return found

    def _cells(self, box: Box, held: Sequence[Box]) -> list[tuple[Box, tuple[int, ...]]]:
        """As `cells`, for no more of them, taken together, than can be meant."""
        found = cells(box, held)
        self._num_cells += len(found)
        if self._num_cells > _MOST_CELLS:
            raise ManifestError(f"placements: cut tensors into more than {_MOST_CELLS} parts, expected far fewer")
        return found

    def _views_of(self, pattern: Pattern, begin: int, shape: Shape) -> tuple[BoxView, ...] | None:
        key = (pattern, begin, shape)
        if key not in self._views:
            piece = PlacedPiece(name="", checkpoint_offset=begin, runtime_offset=0, pattern=pattern)
            self._views[key] = views_of(piece, shape)
        return self._views[key]


def shapes_of(manifests: Sequence[Manifest]) -> Shapes:
    """Shapes of the checkpoint tensors, from whoever knows them; a tensor that is one whole gives its own.

    Raises:
        ManifestError: If two of them know different ones.
    """
    found: Shapes = {}
    for manifest in manifests:
        for spec in manifest.checkpoint:
            if found.setdefault(spec.name, spec.shape) != spec.shape:
                raise ManifestError(
                    f"checkpoint tensor {spec.name!r}: has shape {list(found[spec.name])} and, for rank "
                    f"{manifest.rank} of model {manifest.model!r}, {list(spec.shape)}",
                    tensor=spec.name,
                    model=manifest.model,
                    rank=manifest.rank,
                )
    for manifest in manifests:
        for tensor in manifest.tensors:
            if tensor.name not in found and tensor.name in manifest.whole:
                found[tensor.name] = tensor.shape
    return found


def _placed(holders: Sequence[tuple[int, Region]], held: Sequence[_Held]) -> tuple[tuple[int, Region], ...]:
    """The holders of a template as sources, and their regions where the pieces lie: one of each source."""
    if len(holders) == 1:
        ((position, region),) = holders
        source, base, _ = held[position]
        return ((source, region.moved_to(region.offset + base)),)
    # It may hold an element twice.
    found = {held[position][0]: region.moved_to(region.offset + held[position][1]) for position, region in holders}
    return tuple(found.items())


def _whole(shape: Shape) -> BoxView:
    """The checkpoint tensor itself."""
    return BoxView(box=Box(begins=(0,) * len(shape), sizes=shape), offset=0, strides=row_major_strides(shape))
