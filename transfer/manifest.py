"""What a rank holds, without bytes and without addresses.

A manifest is a value with one canonical JSON text; the SHA-256 of that text is its address. Storages are numbered
and lie one after the other, without gaps, in the rank's *flat space*: the byte addresses that the wire uses. The
flat space is cut into chunks (`chunk_bounds`), whose checksums the first source computes once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeVar

from weightwire.transfer.collector import collector_paused
from weightwire.transfer.dtypes import BY_NAME
from weightwire.transfer.errors import ManifestError, TransferError
from weightwire.transfer.placement import Pattern, PlacedConstant, PlacedPiece, is_whole
from weightwire.transfer.regions import MAX_DIMENSIONS, MAX_ELEMENTS, Region, row_major_strides

FORMAT = 2
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

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} ep={self.ep}"

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
        placement: The checkpoint regions that lie in this tensor, disjoint; empty where none is known.
        constants: The regions of it that hold no checkpoint values; only where a placement is known.
        digest: xxh3-64 of the elements' bytes in row-major order, 16 hex digits; empty where there are none yet.
        region: The tensor's elements in its storage.
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
    constants: tuple[PlacedConstant, ...] = ()
    digest: str = ""
    region: Region = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "region", Region(offset=self.offset, shape=self.shape, strides=self.strides))
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
    def nbytes(self) -> int:
        """Bytes of the elements; the storage may hold more."""
        return self.region.numel * self.itemsize

    @property
    def is_placed(self) -> bool:
        """Whether it is known what lies in it."""
        return bool(self.placement or self.constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Name, dtype and global shape (in elements) of one checkpoint tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        # The number of sizes first: the product of thousands of them takes long.
        is_small = len(self.shape) <= MAX_DIMENSIONS and max((1, *self.shape)) <= MAX_ELEMENTS
        if not is_small or math.prod(self.shape) > MAX_ELEMENTS:
            raise ManifestError(
                f"checkpoint tensor {self.name!r}: has {len(self.shape)} dimensions, or 2^63 elements or more, "
                f"expected fewer elements and at most {MAX_DIMENSIONS} dimensions"
            )
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
            self._check_extent(tensor)
        self._check_pieces()

    def _check_extent(self, tensor: TensorEntry) -> None:
        placed = [piece.runtime_offset + piece.pattern.runtime_reach for piece in tensor.placement]
        constant = (constant.runtime.end for constant in tensor.constants)
        end = max((tensor.region.end, *placed, *constant)) * tensor.itemsize
        if end > self.storages[tensor.storage]:
            raise ManifestError(
                f"tensor {tensor.name!r}: it, or its placement, ends at byte {end} of a storage "
                f"of {self.storages[tensor.storage]} bytes"
            )

    def _check_pieces(self) -> None:
        """A placement speaks of elements that the checkpoint has, as far as the manifest knows the checkpoint."""
        numels = {name: math.prod(spec.shape) for name, spec in self.specs.items()}
        for tensor in self.tensors:
            for piece in tensor.placement:
                numel = numels.get(piece.name)
                end = piece.checkpoint_offset + piece.pattern.checkpoint_reach
                if numel is not None and end > numel:
                    raise ManifestError(
                        f"model {self.model!r} rank {self.rank} tensor {tensor.name!r}: its placement ends at element "
                        f"{end} of checkpoint tensor {piece.name!r}, which has {numel}",
                        model=self.model,
                        rank=self.rank,
                        tensor=tensor.name,
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

    @cached_property
    def specs(self) -> Mapping[str, CheckpointSpec]:
        """The checkpoint's tensors by name."""
        return {spec.name: spec for spec in self.checkpoint}

    @cached_property
    def whole(self) -> frozenset[str]:
        """Names of the tensors that are the checkpoint's tensors of these names, all of them and nothing else.

        Where nobody says which shape the checkpoint's tensor has, a placement is taken at its word.
        """
        return frozenset(
            tensor.name
            for tensor in self.tensors
            if not tensor.constants
            and (tensor.name not in self.specs or self.specs[tensor.name].shape == tensor.shape)
            and is_whole(tensor.name, tensor.region, tensor.placement)
        )

    def flat_region(self, tensor: TensorEntry) -> Region:
        """Where the tensor lies in the flat space, in bytes, row-major order."""
        found = self._flat_regions.get(tensor.name)
        if found is None:
            found = tensor.region.bytes_from(self.storage_bases[tensor.storage], tensor.itemsize)
            self._flat_regions[tensor.name] = found
        return found

    @cached_property
    def _flat_regions(self) -> dict[str, Region]:
        # Filled as they are asked for: of a source in another topology only a few ever are.
        return {}

    @cached_property
    def tied(self) -> frozenset[str]:
        """Names of the tensors whose elements have another name, too."""
        names: dict[tuple[object, ...], list[str]] = {}
        for tensor in self.tensors:
            if tensor.region.numel:
                place = (tensor.storage, tensor.offset, tensor.shape, tensor.strides)
                names.setdefault(place, []).append(tensor.name)
        return frozenset(name for group in names.values() if len(group) > 1 for name in group)

    @cached_property
    def text(self) -> bytes:
        """The canonical JSON text, UTF-8."""
        with collector_paused():
            text = json.dumps(_to_json(self), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return text.encode("utf-8", "surrogatepass")

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
            with collector_paused():
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
    # Numbered as they come: a pattern that thousands of pieces have is written once.
    patterns: dict[Pattern, int] = {}
    tensors = [_tensor_to_json(tensor, patterns) for tensor in manifest.tensors]
    return {
        "format": FORMAT,
        "model": manifest.model,
        "revision": manifest.revision,
        "topology": {"tp": manifest.topology.tp, "pp": manifest.topology.pp, "ep": manifest.topology.ep},
        "rank": manifest.rank,
        "storages": list(manifest.storages),
        "patterns": [pattern.to_json() for pattern in patterns],
        "tensors": tensors,
        "chunk_bytes": manifest.chunk_bytes,
        "chunk_digests": manifest.chunk_digests.hex(),
        "config": manifest.config,
        "checkpoint": [[spec.name, spec.dtype, list(spec.shape)] for spec in manifest.checkpoint],
    }


def _tensor_to_json(tensor: TensorEntry, patterns: dict[Pattern, int]) -> dict[str, object]:
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
        "placement": [
            [p.name, p.checkpoint_offset, p.runtime_offset, patterns.setdefault(p.pattern, len(patterns))]
            for p in tensor.placement
        ],
        "digest": tensor.digest,
    }
    if tensor.strides != row_major_strides(tensor.shape):
        value["strides"] = list(tensor.strides)
    if tensor.constants:
        value["constants"] = [constant.to_json() for constant in tensor.constants]
    return value


def _from_json(value: Mapping[str, object]) -> Manifest:
    if value.get("format") != FORMAT:
        raise ManifestError(f"manifest: format {value.get('format')!r}, expected {FORMAT}")
    known = {f.name for f in fields(Manifest)} | {"format", "patterns"}
    if unknown := sorted(set(value) - known):
        raise ManifestError(f"manifest: unknown fields {unknown}")
    topology = _typed(value["topology"], dict)
    patterns = _patterns_from_json(value["patterns"], _typed(value["tensors"], list))
    config = value["config"]
    return Manifest(
        model=_typed(value["model"], str),
        revision=_typed(value["revision"], str),
        topology=Topology(**{key: _typed(size, int) for key, size in topology.items()}),
        rank=_typed(value["rank"], int),
        storages=_integers(value["storages"]),
        tensors=tuple(_tensor_from_json(item, patterns) for item in _typed(value["tensors"], list)),
        chunk_bytes=_typed(value["chunk_bytes"], int),
        chunk_digests=bytes.fromhex(_typed(value["chunk_digests"], str)),
        config=None if config is None else _typed(config, str),
        checkpoint=tuple(_spec_from_json(item) for item in _typed(value["checkpoint"], list)),
    )


def _patterns_from_json(value: object, tensors: Sequence[object]) -> list[Pattern]:
    items = _typed(value, list)
    # Counted first: a pattern takes far longer to look at than to write down, and each is there for a piece.
    most = sum(len(_typed(_typed(tensor, dict)["placement"], list)) for tensor in tensors)
    if len(items) > most:
        raise ManifestError(f"manifest: {len(items)} patterns for {most} pieces of placements, expected no more")
    return [Pattern.from_json(item) for item in items]


def _tensor_from_json(value: object, patterns: Sequence[Pattern]) -> TensorEntry:
    item = dict(_typed(value, dict))
    shape = _integers(item.pop("shape"))
    strides = _integers(item.pop("strides")) if "strides" in item else row_major_strides(shape)
    pieces = tuple(_piece_from_json(piece, patterns) for piece in _typed(item.pop("placement"), list))
    constants = tuple(PlacedConstant.from_json(constant) for constant in _typed(item.pop("constants", []), list))
    for key in ("storage", "offset"):
        _typed(item[key], int)
    for key in ("name", "dtype", "kind", "state", "layout", "digest"):
        _typed(item[key], str)
    return TensorEntry(**item, shape=shape, strides=strides, placement=pieces, constants=constants)


def _piece_from_json(value: object, patterns: Sequence[Pattern]) -> PlacedPiece:
    # By hand, since a manifest has tens of thousands of them; `type() is`, since a JSON true would pass for an int.
    if type(value) is list and len(value) == 4:
        name, there, here, number = value
        if type(name) is str and type(there) is type(here) is type(number) is int and 0 <= number < len(patterns):
            return PlacedPiece(name=name, checkpoint_offset=there, runtime_offset=here, pattern=patterns[number])
    raise ManifestError(
        f"placement {value!r:.200}: expected [name, offset, offset, number of a pattern below {len(patterns)}]"
    )


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
