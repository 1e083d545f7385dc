"""What a rank holds, without bytes and without addresses.

A manifest is a value with one canonical JSON text; the SHA-256 of that text is its address. Storages are numbered
and lie one after the other, without gaps, in the rank's *flat space*: the byte addresses that the wire uses. The
flat space is cut into chunks (`chunk_bounds`), whose checksums the first source computes once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeVar

from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import ManifestError, TransferError
from weightwire.transfer.placement import PlacedPiece
from weightwire.transfer.regions import MAX_ELEMENTS, Region, row_major_strides

FORMAT = 1
DEFAULT_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 1 << 26
KINDS = ("parameter", "buffer", "attribute")
STATES = ("placed", "final")

_DIGEST = re.compile(r"[0-9a-f]{16}")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of an instance; `world_size` ranks, global rank = pp_rank x tp + tp_rank."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep) < 1 or self.tp % self.ep:
            raise ManifestError(
                f"topology tp={self.tp} pp={self.pp} ep={self.ep}: expected sizes of 1 or more, ep dividing tp"
            )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of one rank: a view into a numbered storage.

    Attributes:
        name: Runtime name.
        dtype: Torch dtype without the `torch.` prefix.
        shape: Local shape, in elements.
        strides: In elements.
        storage: Number of the storage.
        offset: First element, in elements from the start of the storage.
        kind: `parameter`, `buffer` or `attribute` (a tensor that the module tree does not list).
        state: `placed` (checkpoint layout) or `final` (after post-processing).
        layout: Layout fingerprint; equal fingerprints mean that the bytes can be copied as they are.
        placement: The checkpoint regions that lie in this tensor; empty where none is known.
        digest: xxh3-64 of the elements' bytes in row-major order, 16 hex digits; empty where there are none yet.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int
    layout: str
    kind: str = "parameter"
    state: str = "placed"
    placement: tuple[PlacedPiece, ...] = ()
    digest: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in BY_NAME:
            raise ManifestError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {sorted(BY_NAME)}")
        if self.kind not in KINDS or self.state not in STATES:
            raise ManifestError(f"tensor {self.name!r}: kind {self.kind!r}, state {self.state!r} are not known")
        if self.digest and not _DIGEST.fullmatch(self.digest):
            raise ManifestError(f"tensor {self.name!r}: digest {self.digest!r:.80}, expected 16 hex digits")

    @property
    def itemsize(self) -> int:
        return BY_NAME[self.dtype].itemsize

    @property
    def region(self) -> Region:
        """The tensor's elements in its storage."""
        return Region(offset=self.offset, shape=self.shape, strides=self.strides)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; the storage may hold more."""
        return self.region.numel * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Name, dtype and global shape (in elements) of one checkpoint tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in BY_NAME or min((0, *self.shape)) < 0:
            raise ManifestError(f"checkpoint tensor {self.name!r}: {self.dtype!r} {list(self.shape)} cannot be")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one rank holds.

    Attributes:
        model: Model id, may contain `/`.
        revision: Identity of the model's definition: config and checkpoint headers.
        topology: Sizes of the instance.
        rank: Global rank in it.
        storages: Bytes of each storage, in flat order.
        tensors: In a stable order.
        chunk_bytes: Upper limit of a chunk.
        chunk_digests: xxh3-64 of each chunk of the flat space, 8 bytes each, big-endian; empty where the
            rank's bytes do not exist yet.
        config: Text of the model's config.json, if there is one.
        checkpoint: Specs of the checkpoint that the tensors come from.
    """

    model: str
    revision: str
    storages: tuple[int, ...]
    tensors: tuple[TensorEntry, ...]
    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    chunk_digests: bytes = b""
    config: str | None = None
    checkpoint: tuple[CheckpointSpec, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.topology.world_size:
            raise ManifestError(f"manifest: rank {self.rank} of a world of {self.topology.world_size}")
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ManifestError(f"manifest: chunk_bytes is {self.chunk_bytes}, expected 1 to {MAX_CHUNK_BYTES}")
        if min((0, *self.storages)) < 0 or sum(self.storages) > MAX_ELEMENTS:
            raise ManifestError("manifest: a storage has a negative size, or all of them have 2^63 bytes or more")
        self._check_tensors()
        if self.chunk_digests:
            self._check_chunk_digests()

    def _check_chunk_digests(self) -> None:
        # Counted first: a short text may claim storages of which the bounds alone would fill the memory.
        at_least = sum(-(-nbytes // self.chunk_bytes) for nbytes in self.storages if nbytes >= self.chunk_bytes)
        if len(self.chunk_digests) < 8 * at_least or len(self.chunk_digests) != 8 * (len(self.chunk_bounds) - 1):
            raise ManifestError(
                f"manifest: {len(self.chunk_digests) / 8:g} chunk digests for at least {at_least} chunks of "
                f"{self.total_bytes} bytes"
            )

    def _check_tensors(self) -> None:
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise ManifestError(f"tensor {tensor.name!r}: listed twice in the manifest")
            seen.add(tensor.name)
            if not 0 <= tensor.storage < len(self.storages):
                raise ManifestError(
                    f"tensor {tensor.name!r}: storage {tensor.storage} of {len(self.storages)} storages"
                )
            if tensor.region.overlaps_itself:
                raise ManifestError(f"tensor {tensor.name!r}: strides {list(tensor.strides)} let elements overlap")
            end = max(region.end for region in (tensor.region, *(piece.runtime for piece in tensor.placement)))
            if end * tensor.itemsize > self.storages[tensor.storage]:
                raise ManifestError(
                    f"tensor {tensor.name!r}: it, or its placement, ends at byte {end * tensor.itemsize} of a storage "
                    f"of {self.storages[tensor.storage]} bytes"
                )

    @cached_property
    def storage_bases(self) -> tuple[int, ...]:
        """Flat address of each storage, and of the end."""
        return tuple(itertools.accumulate(self.storages, initial=0))

    @property
    def total_bytes(self) -> int:
        return self.storage_bases[-1]

    @cached_property
    def chunk_bounds(self) -> tuple[int, ...]:
        return chunk_bounds(self.storages, chunk_bytes=self.chunk_bytes)

    def chunks_between(self, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """Flat bytes `begin` to `end` cut at chunk bounds: `(begin, end, number of the chunk if it is whole)`."""
        bounds = self.chunk_bounds
        index = bisect_right(bounds, begin) - 1
        while begin < end:
            stop = min(end, bounds[index + 1])
            yield begin, stop, index if (begin, stop) == (bounds[index], bounds[index + 1]) else None
            begin = stop
            index += 1

    def storage_at(self, address: int) -> int:
        """Number of the storage that owns the flat byte `address`."""
        return bisect_right(self.storage_bases, address) - 1

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        return {tensor.name: tensor for tensor in self.tensors}

    def flat_region(self, tensor: TensorEntry) -> Region:
        """Where the tensor lies in the flat space, in bytes, row-major order."""
        return self._flat_regions[tensor.name]

    @cached_property
    def _flat_regions(self) -> Mapping[str, Region]:
        bases = self.storage_bases
        return {t.name: t.region.in_bytes(t.itemsize).shifted(bases[t.storage]) for t in self.tensors}

    @cached_property
    def text(self) -> bytes:
        """The canonical JSON text, UTF-8."""
        return json.dumps(_to_json(self), ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )

    @cached_property
    def digest(self) -> str:
        """The manifest's address: SHA-256 of `text`, in hex."""
        return hashlib.sha256(self.text).hexdigest()

    @classmethod
    def from_text(cls, text: bytes, *, digest: str | None = None) -> Manifest:
        """Parse a canonical text.

        Args:
            text: As `Manifest.text`.
            digest: What the text must hash to, if it was asked for by address.

        Raises:
            ManifestError: If the text is no manifest, contradicts itself, has another digest, or is asked for by
                address and not in canonical form.
        """
        if digest is not None and (actual := hashlib.sha256(text).hexdigest()) != digest:
            raise ManifestError(f"manifest {digest}: its bytes hash to {actual}")
        try:
            manifest = _from_json(_typed(json.loads(text), dict))
        except ManifestError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError, TransferError) as error:
            raise ManifestError(f"manifest: not in format {FORMAT}: {type(error).__name__}: {error}") from error
        if digest is not None and manifest.digest != digest:
            # It would go by two addresses, and its source knows only one of them.
            raise ManifestError(f"manifest {digest}: its text is not the canonical one, {manifest.digest}")
        return manifest


def chunk_bounds(storages: Iterable[int], *, chunk_bytes: int) -> tuple[int, ...]:
    """Cut a flat space into chunks; chunk `i` is `[bounds[i], bounds[i + 1])`.

    A storage of `chunk_bytes` or more is cut on a grid of its own, so that its chunks do not depend on its
    neighbours; smaller ones that follow each other share a chunk and are never split.
    """
    bounds = [0]
    end = 0
    for nbytes in storages:
        if nbytes >= chunk_bytes:
            if end > bounds[-1]:
                bounds.append(end)
            bounds.extend(range(end + chunk_bytes, end + nbytes, chunk_bytes))
            end += nbytes
            bounds.append(end)
        else:
            if end + nbytes - bounds[-1] > chunk_bytes:
                bounds.append(end)
            end += nbytes
    if end > bounds[-1]:
        bounds.append(end)
    return tuple(bounds)


def layout_fingerprint(
    *, engine: str, dtype: str, shape: Sequence[int], strides: Sequence[int], facts: Mapping[str, str] | None = None
) -> str:
    """Digest of all that decides the physical layout of one tensor.

    Args:
        engine: Name and version of what laid the tensor out; `plain` for torch tensors by checkpoint name.
        dtype: Torch dtype name.
        shape: Local shape, in elements.
        strides: In elements; those of dimensions without extent do not count.
        facts: What else decides: quantisation, kernel layout, padding, parallel coordinates.
    """
    canonical = Region(offset=0, shape=tuple(shape), strides=tuple(strides))
    steps = [stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True)]
    walk = steps if canonical.numel and not canonical.is_contiguous else "row-major"
    text = json.dumps([engine, dtype, list(shape), walk, sorted((facts or {}).items())], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _to_json(manifest: Manifest) -> dict[str, object]:
    return {
        "format": FORMAT,
        "model": manifest.model,
        "revision": manifest.revision,
        "topology": {"tp": manifest.topology.tp, "pp": manifest.topology.pp, "ep": manifest.topology.ep},
        "rank": manifest.rank,
        "storages": list(manifest.storages),
        "tensors": [_tensor_to_json(tensor) for tensor in manifest.tensors],
        "chunk_bytes": manifest.chunk_bytes,
        "chunk_digests": manifest.chunk_digests.hex(),
        "config": manifest.config,
        "checkpoint": [[spec.name, spec.dtype, list(spec.shape)] for spec in manifest.checkpoint],
    }


def _tensor_to_json(tensor: TensorEntry) -> dict[str, object]:
    # Strides are left out where they say nothing: most tensors are row-major, and manifests are long.
    value: dict[str, object] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "storage": tensor.storage,
        "offset": tensor.offset,
        "kind": tensor.kind,
        "state": tensor.state,
        "layout": tensor.layout,
        "placement": [piece.to_json() for piece in tensor.placement],
        "digest": tensor.digest,
    }
    if tensor.strides != row_major_strides(tensor.shape):
        value["strides"] = list(tensor.strides)
    return value


def _from_json(value: Mapping[str, object]) -> Manifest:
    if value.get("format") != FORMAT:
        raise ManifestError(f"manifest: format {value.get('format')!r}, expected {FORMAT}")
    known = {f.name for f in fields(Manifest)} | {"format"}
    if unknown := sorted(set(value) - known):
        raise ManifestError(f"manifest: unknown fields {unknown}")
    topology = _typed(value["topology"], dict)
    config = value["config"]
    return Manifest(
        model=_typed(value["model"], str),
        revision=_typed(value["revision"], str),
        topology=Topology(**{key: _typed(size, int) for key, size in topology.items()}),
        rank=_typed(value["rank"], int),
        storages=_integers(value["storages"]),
        tensors=tuple(_tensor_from_json(item) for item in _typed(value["tensors"], list)),
        chunk_bytes=_typed(value["chunk_bytes"], int),
        chunk_digests=bytes.fromhex(_typed(value["chunk_digests"], str)),
        config=None if config is None else _typed(config, str),
        checkpoint=tuple(_spec_from_json(item) for item in _typed(value["checkpoint"], list)),
    )


def _tensor_from_json(value: object) -> TensorEntry:
    item = dict(_typed(value, dict))
    shape = _integers(item.pop("shape"))
    strides = _integers(item.pop("strides")) if "strides" in item else row_major_strides(shape)
    pieces = tuple(PlacedPiece.from_json(piece) for piece in _typed(item.pop("placement"), list))
    for key in ("storage", "offset"):
        _typed(item[key], int)
    for key in ("name", "dtype", "kind", "state", "layout", "digest"):
        _typed(item[key], str)
    return TensorEntry(**item, shape=shape, strides=strides, placement=pieces)


def _spec_from_json(value: object) -> CheckpointSpec:
    name, dtype, shape = _typed(value, list)
    return CheckpointSpec(name=_typed(name, str), dtype=_typed(dtype, str), shape=_integers(shape))


def _integers(value: object) -> tuple[int, ...]:
    return tuple(_typed(item, int) for item in _typed(value, list))


def _typed(value: object, kind: type[_Value]) -> _Value:
    # `type() is`, since a JSON true would pass for an int.
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is not of type {kind.__name__}")
    return value
