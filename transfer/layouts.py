"""Layouts of shells: of a checkpoint by its own names, and of whatever tensors there are.

A layout says which storages there are and which tensor lies where in them. It needs no memory: tensors may be on the
meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from weightwire.transfer.dtypes import dtype_of
from weightwire.transfer.errors import ManifestError
from weightwire.transfer.manifest import (
    DEFAULT_CHUNK_BYTES,
    CheckpointSpec,
    Manifest,
    TensorEntry,
    Topology,
    layout_fingerprint,
)
from weightwire.transfer.placement import ShellPlacement, place_whole
from weightwire.transfer.regions import Region, row_major

PLAIN = "plain"

# A storage that is cut out of a larger allocation starts at a multiple of this, so that views of every dtype
# keep whole element offsets.
_BASE_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What a set of shells is a copy of. See `Manifest` for the fields."""

    model: str
    revision: str = ""
    config: str | None = None
    checkpoint: tuple[CheckpointSpec, ...] = ()
    topology: Topology = field(default_factory=Topology)
    rank: int = 0

    def manifest(
        self, storages: Iterable[int], tensors: Iterable[TensorEntry], chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> Manifest:
        """The manifest, without digests, of these storages and tensors."""
        return Manifest(
            model=self.model,
            revision=self.revision,
            config=self.config,
            checkpoint=self.checkpoint,
            topology=self.topology,
            rank=self.rank,
            storages=tuple(storages),
            tensors=tuple(tensors),
            chunk_bytes=chunk_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A manifest without digests, and where its storages lie in the allocations of the tensors.

    Attributes:
        cuts: For each storage, a tensor in its allocation, and the bytes of the allocation that the storage is.
    """

    manifest: Manifest
    cuts: tuple[tuple[torch.Tensor, int, int], ...]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        identity: ModelIdentity,
        placements: Mapping[str, ShellPlacement] | None = None,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> Layout:
        """Describe tensors by runtime name; views of one allocation share a storage.

        Args:
            tensors: On any device.
            identity: Of the model.
            placements: What lies in them, in elements of the allocations, as torch counts them; nothing is said of
                tensors that are not named. None: each is the checkpoint's tensor of its name, whole.
            chunk_bytes: Of the manifest.

        Raises:
            ManifestError: If a tensor is not plain strided memory, or elements of it share memory.
            DtypeError: If a dtype may not travel.
        """
        groups: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            _check_plain(name, tensor)
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        cuts, entries = [], dict[str, TensorEntry]()
        for number, names in enumerate(groups.values()):
            begin, end = _span([tensors[name] for name in names])
            cuts.append((tensors[names[0]], begin, end))
            for name in names:
                entry = _describe(name, tensors[name], storage=number, base=begin)
                placement = None if placements is None else placements.get(name, ShellPlacement())
                entries[name] = _placed(entry, placement, base=begin)
        sizes = [end - begin for _, begin, end in cuts]
        manifest = identity.manifest(sizes, [entries[name] for name in tensors], chunk_bytes)
        return cls(manifest=manifest, cuts=tuple(cuts))

    def described(self, fingerprints: Mapping[str, str]) -> Layout:
        """With these layout fingerprints, by runtime name; tensors that are not named keep theirs."""
        entries = (replace(tensor, layout=fingerprints.get(tensor.name, tensor.layout)) for tensor in self._tensors)
        return replace(self, manifest=replace(self.manifest, tensors=tuple(entries)))

    def without(self, exclude: Sequence[str]) -> Layout:
        """What is left to be published when some checkpoint tensors are not.

        A shell keeps the pieces that are left; one that had pieces and has none any more is not published.

        Args:
            exclude: Shell patterns of checkpoint names.
        """
        kept: list[TensorEntry] = []
        for tensor in self._tensors:
            pieces = tuple(
                piece for piece in tensor.placement if not any(fnmatchcase(piece.name, pattern) for pattern in exclude)
            )
            if pieces or not tensor.placement:
                kept.append(replace(tensor, placement=pieces))
        return replace(self, manifest=replace(self.manifest, tensors=tuple(kept)))

    @property
    def _tensors(self) -> tuple[TensorEntry, ...]:
        return self.manifest.tensors


def plain_fingerprint(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Layout fingerprint of a torch tensor that no engine has touched."""
    return layout_fingerprint(engine=PLAIN, dtype=dtype, shape=shape, strides=strides)


def plain_layout(specs: Iterable[CheckpointSpec], identity: ModelIdentity) -> Manifest:
    """Each tensor in a storage of its own."""
    entries = [plain_entry(spec, storage=number) for number, spec in enumerate(specs)]
    return identity.manifest((entry.nbytes for entry in entries), entries)


def identified(manifest: Manifest, identity: ModelIdentity) -> Manifest:
    """The manifest with model, revision, config and specs of an identity; tensors, storages and digests stay."""
    return replace(
        manifest,
        model=identity.model,
        revision=identity.revision,
        config=identity.config,
        checkpoint=identity.checkpoint,
    )


def extended_layout(base: Manifest, specs: Iterable[CheckpointSpec]) -> Manifest:
    """`base` as it is, and behind it the tensors of `specs` that it lacks; without digests."""
    lacking = [spec for spec in specs if spec.name not in base.by_name]
    added = [plain_entry(spec, storage=len(base.storages) + number) for number, spec in enumerate(lacking)]
    return replace(
        base,
        storages=(*base.storages, *(entry.nbytes for entry in added)),
        tensors=(*(replace(tensor, digest="") for tensor in base.tensors), *added),
        chunk_digests=b"",
    )


def plain_entry(spec: CheckpointSpec, *, storage: int) -> TensorEntry:
    """A tensor that is all of its storage."""
    region = row_major(spec.shape)
    return TensorEntry(
        name=spec.name,
        dtype=spec.dtype,
        shape=region.shape,
        strides=region.strides,
        storage=storage,
        offset=0,
        layout=plain_fingerprint(spec.dtype, region.shape, region.strides),
        placement=place_whole(spec.name, region),
    )


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is not plain memory, before anything is read or written."""
    wrong = None
    if tensor.layout is not torch.strided or tensor.is_quantized:
        wrong = f"has layout {tensor.layout}, expected plain strided memory"
    elif tensor.is_conj() or tensor.is_neg():
        wrong = "is a lazily conjugated or negated view, expected its resolved bytes"
    elif _elements(tensor).overlaps_itself:
        wrong = f"has strides {list(tensor.stride())}: elements share memory, expected each to have its own"
    elif _elements(tensor).end * tensor.itemsize > (held := tensor.untyped_storage().nbytes()) and tensor.numel():
        # Torch would quietly grow it, and nobody would look there: the owner has let go of this memory.
        wrong = f"has a storage of {held} bytes, expected {_elements(tensor).end * tensor.itemsize} or more"
    if wrong:
        raise ManifestError(f"tensor {name!r}: {wrong}", tensor=name)


def _span(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """The bytes of a common allocation that `tensors` span; what lies before and after belongs to others."""
    spans = [(_elements(tensor), tensor.itemsize) for tensor in tensors]
    filled = [region.in_bytes(itemsize) for region, itemsize in spans if region.numel]
    begin = min((region.offset for region in filled), default=0) // _BASE_ALIGNMENT_BYTES * _BASE_ALIGNMENT_BYTES
    return begin, max((region.end for region in filled), default=begin)


def _elements(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


def _describe(name: str, tensor: torch.Tensor, *, storage: int, base: int) -> TensorEntry:
    dtype = dtype_of(tensor)
    offset = int(tensor.storage_offset()) - base // dtype.itemsize if tensor.numel() else 0
    region = Region(offset=offset, shape=tuple(tensor.shape), strides=tensor.stride())
    return TensorEntry(
        name=name,
        dtype=dtype.name,
        shape=region.shape,
        strides=region.strides,
        storage=storage,
        offset=offset,
        layout=plain_fingerprint(dtype.name, region.shape, region.strides),
    )


def _placed(entry: TensorEntry, placement: ShellPlacement | None, *, base: int) -> TensorEntry:
    """With what lies in it; `base` is the byte of the allocation at which the storage begins."""
    if placement is None:
        return replace(entry, placement=place_whole(entry.name, entry.region))
    shift = -(base // entry.itemsize)
    return replace(
        entry,
        placement=tuple(piece.shifted(shift) if shift else piece for piece in placement.pieces),
        constants=tuple(constant.shifted(shift) for constant in placement.constants),
    )
