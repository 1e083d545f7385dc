"""Layouts of shells by checkpoint name: each tensor whole, row-major, as the published file has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from weightwire.transfer.manifest import (
    DEFAULT_CHUNK_BYTES,
    CheckpointSpec,
    Manifest,
    TensorEntry,
    Topology,
    layout_fingerprint,
)
from weightwire.transfer.placement import place_whole
from weightwire.transfer.regions import row_major

PLAIN = "plain"


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


def plain_fingerprint(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Layout fingerprint of a torch tensor that no engine has touched."""
    return layout_fingerprint(engine=PLAIN, dtype=dtype, shape=shape, strides=strides)


def plain_layout(specs: Iterable[CheckpointSpec], identity: ModelIdentity) -> Manifest:
    """Each tensor in a storage of its own."""
    entries = [plain_entry(spec, storage=number) for number, spec in enumerate(specs)]
    return identity.manifest((entry.nbytes for entry in entries), entries)


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
