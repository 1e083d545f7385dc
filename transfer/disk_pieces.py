"""Which pieces of the local checkpoint fill which bytes of a rank's shells, by the shells' placement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from weightwire.transfer.checkpoint.regions_on_disk import DiskCopy
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import CheckpointSpec, Manifest
from weightwire.transfer.plan import DiskPiece
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells


def names_on_disk(target: Manifest, specs: Mapping[str, CheckpointSpec]) -> frozenset[str]:
    """The checkpoint tensors of which the disk has all that the target wants.

    A whole tensor counts by its name alone: that dtype and shape agree is for `check_specs` to say.
    """
    found = set(specs)
    for tensor in target.tensors:
        if tensor.name not in target.whole:
            found -= {piece.name for piece in tensor.placement if not _holds(specs.get(piece.name), piece.ends[0])}
    return frozenset(found)


def _holds(spec: CheckpointSpec | None, end: int) -> bool:
    return spec is not None and end <= math.prod(spec.shape)


def disk_copies(
    shells: Shells, pieces: Iterable[DiskPiece], specs: Mapping[str, CheckpointSpec], covered: IntervalSet
) -> Iterator[DiskCopy]:
    """The reads that fill what is missing; what is covered is not written again.

    A piece that is strided on either side, or changes its dtype on the way, is read whole.

    Args:
        shells: Written by whoever makes the copies.
        pieces: Of a plan for the shells' manifest, each named and on disk.
        specs: Of the checkpoint, by name.
        covered: Flat bytes that are filled and verified.
    """
    manifest = shells.manifest
    for piece in pieces:
        assert piece.name is not None, "what has no name is on no disk"
        tensor = manifest.by_name[piece.tensor]
        base, itemsize = manifest.storage_bases[tensor.storage], tensor.itemsize
        if specs[piece.name].dtype != tensor.dtype:
            box = shells.box(_byte_box(piece.runtime, itemsize).shifted(base))
            typed = box.view(dtype_named(tensor.dtype).torch_dtype).squeeze(-1)
            yield DiskCopy(name=piece.name, source=piece.checkpoint, target=typed)
            continue
        runtime = piece.runtime.in_bytes(itemsize).shifted(base)
        source = piece.checkpoint.in_bytes(itemsize)
        if runtime.is_contiguous and source.is_contiguous:
            for begin, end in covered.missing(runtime.offset, runtime.end):
                run = Region(offset=begin, shape=(end - begin,), strides=(1,))
                at = source.offset + begin - runtime.offset
                yield DiskCopy(
                    name=piece.name,
                    source=Region(offset=at, shape=(end - begin,), strides=(1,)),
                    target=shells.box(run),
                    is_raw=True,
                )
        else:
            box = shells.box(_byte_box(piece.runtime, itemsize).shifted(base))
            source = _byte_box(piece.checkpoint, itemsize)
            yield DiskCopy(name=piece.name, source=source, target=box, is_raw=True)


def _byte_box(region: Region, itemsize: int) -> Region:
    """The region in bytes with its dimensions as they are, so that both sides of a copy keep equal shapes."""
    return Region(
        offset=region.offset * itemsize,
        shape=(*region.shape, itemsize),
        strides=(*(stride * itemsize for stride in region.strides), 1),
    )
