"""Whether a target can take over a source's manifest, digests and all, because it will hold the very same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter

from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Manifest, TensorEntry

_LAYOUT_OF_TENSOR = attrgetter(*(each.name for each in fields(TensorEntry) if each.name != "digest"))
_OF_MANIFEST = attrgetter(
    *(each.name for each in fields(Manifest) if each.init and each.name not in ("tensors", "chunk_digests"))
)


def adoptable(layout: Manifest, held: Iterable[Manifest]) -> Manifest | None:
    """The first manifest that differs from `layout` in its digests alone; None if there is none.

    A manifest whose chunks have bytes of no tensor is left out: nobody sends these, so their digests would not hold.

    Args:
        layout: Of the target's shells, with model, revision, config and specs.
        held: What sources hold, best first.
    """
    for manifest in held:
        if (
            manifest.chunk_digests
            and _OF_MANIFEST(layout) == _OF_MANIFEST(manifest)
            and len(layout.tensors) == len(manifest.tensors)
            and all(map(_is_alike, layout.tensors, manifest.tensors))
            and not _has_holes(manifest)
        ):
            return manifest
    return None


def _is_alike(ours: TensorEntry, theirs: TensorEntry) -> bool:
    return bool(theirs.digest) and bool(_LAYOUT_OF_TENSOR(ours) == _LAYOUT_OF_TENSOR(theirs))


def _has_holes(manifest: Manifest) -> bool:
    covered = IntervalSet()
    for tensor in manifest.tensors:
        covered.add_region(manifest.flat_region(tensor))
    return not covered.covers(0, manifest.total_bytes)
