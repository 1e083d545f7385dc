"""Which pieces of the local checkpoint fill which bytes of a rank's shells, by the shells' placement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from weightwire.transfer.checkpoint.regions_on_disk import DiskCopy
from weightwire.transfer.coverage import count_coverage
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry
from weightwire.transfer.placement import PlacedPiece, place_whole
from weightwire.transfer.planning import filled_region
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells


def is_whole(tensor: TensorEntry) -> bool:
    """Whether a tensor is the checkpoint's tensor of the same name, all of it and nothing else."""
    return tensor.placement == place_whole(tensor.name, tensor.region)


def tensors_on_disk(target: Manifest, specs: Mapping[str, CheckpointSpec]) -> frozenset[str]:
    """The tensors of which every element is in the checkpoint.

    A whole tensor counts by its name alone: that dtype and shape agree is for `check_specs` to say.
    """
    return frozenset(
        tensor.name
        for tensor in target.tensors
        if (tensor.name in specs if is_whole(tensor) else _is_composed(tensor, specs))
    )


def _is_composed(tensor: TensorEntry, specs: Mapping[str, CheckpointSpec]) -> bool:
    if not all(_holds(specs.get(piece.name), piece, tensor.dtype) for piece in tensor.placement):
        return False
    return count_coverage(tensor.region, (piece.runtime for piece in tensor.placement)).is_exact


def _holds(spec: CheckpointSpec | None, piece: PlacedPiece, dtype: str) -> bool:
    if spec is None or spec.dtype != dtype:
        return False
    return piece.checkpoint.end <= math.prod(spec.shape)


def disk_copies(shells: Shells, tensor: TensorEntry, covered: IntervalSet) -> Iterator[DiskCopy]:
    """The reads that fill what is missing of one tensor; what is covered is not written again.

    A piece that is strided on either side is read whole unless all of it is covered.

    Args:
        shells: Written by whoever makes the copies.
        tensor: One of the shells' manifest.
        covered: Flat bytes that are filled and verified.
    """
    base = shells.manifest.storage_bases[tensor.storage]
    for piece in tensor.placement:
        runtime = piece.runtime.in_bytes(tensor.itemsize).shifted(base)
        source = piece.checkpoint.in_bytes(tensor.itemsize)
        if runtime.is_contiguous and source.is_contiguous:
            for begin, end in covered.missing(runtime.offset, runtime.end):
                (view,) = shells.views(begin, end)
                at = source.offset + begin - runtime.offset
                yield DiskCopy(
                    name=piece.name,
                    source=Region(offset=at, shape=(end - begin,), strides=(1,)),
                    target=torch.frombuffer(view, dtype=torch.uint8),
                    is_raw=True,
                )
        elif not all(covered.covers(begin, end) for begin, end in filled_region(runtime)):
            box = shells.box(_byte_box(piece.runtime, tensor.itemsize).shifted(base))
            source = _byte_box(piece.checkpoint, tensor.itemsize)
            yield DiskCopy(name=piece.name, source=source, target=box, is_raw=True)


def _byte_box(region: Region, itemsize: int) -> Region:
    """The region in bytes with its dimensions as they are, so that both sides of a copy keep equal shapes."""
    return Region(
        offset=region.offset * itemsize,
        shape=(*region.shape, itemsize),
        strides=(*(stride * itemsize for stride in region.strides), 1),
    )
