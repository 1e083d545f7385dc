"""A rank's storages: what a target fills and a source serves.

`Shells` ties a manifest to memory. Tensors are views into storages, and storages lie one after the other in the
rank's flat space, so that a transfer sees byte ranges and never a tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from weightwire.transfer.dtypes import dtype_named, dtype_of
from weightwire.transfer.errors import ManifestError, NotFoundError
from weightwire.transfer.integrity import DIGEST_BYTES, checksum, digest_text
from weightwire.transfer.layouts import ModelIdentity, plain_fingerprint
from weightwire.transfer.manifest import (
    DEFAULT_CHUNK_BYTES,
    Manifest,
    TensorEntry,
)
from weightwire.transfer.placement import place_whole
from weightwire.transfer.regions import Region

# A storage that is cut out of a larger allocation starts at a multiple of this, so that views of every dtype
# keep whole element offsets.
_BASE_ALIGNMENT_BYTES = 16


class Shells:
    """The storages of one rank on the CPU, and the manifest that describes them.

    Attributes:
        manifest: Without digests until `seal` is called.
    """

    def __init__(self, manifest: Manifest, storages: Iterable[torch.Tensor]) -> None:
        """Args:
        manifest: Describes `storages`.
        storages: One flat, contiguous uint8 tensor for each storage of the manifest. Kept, not copied.
        """
        self.manifest = manifest
        self._storages = list(storages)
        sizes = tuple(storage.numel() for storage in self._storages)
        if sizes != manifest.storages:
            raise ManifestError(f"shells: storages of {sizes} bytes, the manifest has {manifest.storages}")
        # Empty storages own no flat address; leaving them out makes a chunk's views a plain slice of a list.
        self._views = [storage.numpy().data for storage in self._storages if storage.numel()]
        self._bases = list(accumulate((len(view) for view in self._views), initial=0))

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        identity: ModelIdentity | None = None,
        *,
        non_persistent: bool = False,
        is_placed: bool = True,
    ) -> Shells:
        """The parameters and buffers of `module`, in place; tied ones share a storage, so they move once.

        Args:
            module: On the CPU. Its tensors are written where they lie: data pointers, strides and ties stay.
            identity: Of the model; without it a nameless one.
            non_persistent: Also take buffers that a checkpoint would not hold.
            is_placed: Whether each tensor is the checkpoint's tensor of the same name, whole; if not, nothing is said
                about what lies in it.

        Raises:
            ManifestError: If a tensor is not plain CPU memory (meta, sparse, quantised, conjugated, on a device).
            DtypeError: If a dtype may not travel.
        """
        shells = cls.from_tensors(dict(_module_tensors(module, non_persistent)), identity)
        if not is_placed:
            entries = tuple(replace(tensor, placement=()) for tensor in shells.manifest.tensors)
            shells.manifest = replace(shells.manifest, tensors=entries)
        return shells

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], identity: ModelIdentity | None = None,
        *, chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> Shells:  # fmt: skip
        """Tensors by runtime name, in place. Views into one allocation share a storage.

        Raises:
            ManifestError: As `from_module`.
            DtypeError: If a dtype may not travel.
        """
        identity = identity or ModelIdentity(model="")
        groups: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            _check_plain(name, tensor)
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
        storages, entries = [], dict[str, TensorEntry]()
        for number, names in enumerate(groups.values()):
            base, storage = _cut_storage([tensors[name] for name in names])
            storages.append(storage)
            for name in names:
                entries[name] = _describe(name, tensors[name], storage=number, base=base)
        sizes = [storage.numel() for storage in storages]
        return cls(identity.manifest(sizes, [entries[name] for name in tensors], chunk_bytes), storages)

    @classmethod
    def allocate(cls, manifest: Manifest) -> Shells:
        """Empty shells of a manifest's layout, with its aliases, and without its digests.

        Memory is not touched: pages appear as they are written.
        """
        entries = tuple(replace(tensor, digest="") for tensor in manifest.tensors)
        storages = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in manifest.storages]
        return cls(replace(manifest, tensors=entries, chunk_digests=b""), storages)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that runtime name: a view, dtype, shape and strides as the manifest says.

        Raises:
            NotFoundError: If the manifest has no such tensor.
        """
        entry = self.manifest.by_name.get(name)
        if entry is None:
            raise NotFoundError(f"tensor {name!r}: not among the {len(self.manifest.tensors)} here", kind="tensor")
        dtype = dtype_named(entry.dtype).torch_dtype
        storage = self._storages[entry.storage].untyped_storage()
        first = self._storages[entry.storage].storage_offset() // entry.itemsize
        return torch.empty(0, dtype=dtype).set_(storage, first + entry.offset, entry.shape, entry.strides)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, aliases included, in the manifest's order."""
        for entry in self.manifest.tensors:
            yield entry.name, self.tensor(entry.name)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """The memory behind flat bytes `begin` to `end`: writable views, in order, none of them empty."""
        if begin >= end:
            return []
        first = bisect_right(self._bases, begin) - 1
        last = bisect_right(self._bases, end - 1) - 1
        views = self._views[first : last + 1]
        if end != self._bases[last + 1]:
            views[-1] = views[-1][: end - self._bases[last]]
        if begin != self._bases[first]:
            views[0] = views[0][begin - self._bases[first] :]
        return views

    def box(self, region: Region) -> torch.Tensor:
        """A strided uint8 view of a flat region, in bytes, that lies in one storage."""
        at = bisect_right(self._bases, region.offset) - 1
        flat = torch.frombuffer(self._views[at], dtype=torch.uint8)
        return flat.as_strided(region.shape, region.strides, region.offset - self._bases[at])

    def gather(self, region: Region, begin: int = 0, end: int | None = None) -> list[memoryview]:
        """Bytes `begin` to `end` of a flat region in row-major order.

        Views of the storages where the region is contiguous, else a copy of `end - begin` bytes.
        """
        end = region.numel if end is None else end
        if region.is_contiguous:
            return self.views(region.offset + begin, region.offset + end)
        # `reshape` leaves a box of one dimension as it is, with its gaps.
        boxes = [self.box(part).reshape(-1).contiguous() for part in region.packed(begin, end)]
        return [box.numpy().data for box in boxes]

    def scatter(self, packed: memoryview, region: Region, begin: int) -> None:
        """Write `packed` over bytes `begin` and following of a flat region, in row-major order."""
        taken = 0
        if region.is_contiguous:
            for view in self.views(region.offset + begin, region.offset + begin + len(packed)):
                view[:] = packed[taken : (taken := taken + len(view))]
            return
        source = torch.frombuffer(packed, dtype=torch.uint8)
        for part in region.packed(begin, begin + len(packed)):
            self.box(part).copy_(source[taken : taken + part.numel].view(part.shape))
            taken += part.numel

    def digest(self, name: str) -> str:
        """xxh3-64 of a tensor's bytes in row-major order, computed now."""
        region = self.manifest.flat_region(self.manifest.by_name[name])
        step = self.manifest.chunk_bytes
        pieces = (self.gather(region, at, min(at + step, region.numel)) for at in range(0, region.numel, step))
        return digest_text(checksum(view for views in pieces for view in views))

    def seal(self, on_bytes: Callable[[int], None] = lambda _: None) -> Manifest:
        """Compute the digests of every chunk and tensor and put them into the manifest.

        Args:
            on_bytes: Called with the bytes of each chunk that is done.
        """
        entries = tuple(replace(tensor, digest=self.digest(tensor.name)) for tensor in self.manifest.tensors)
        digests = bytearray()
        for begin, end in pairwise(self.manifest.chunk_bounds):
            digests += checksum(self.views(begin, end)).to_bytes(DIGEST_BYTES, "big")
            on_bytes(end - begin)
        self.manifest = replace(self.manifest, tensors=entries, chunk_digests=bytes(digests))
        return self.manifest

    def identify(self, identity: ModelIdentity) -> None:
        """Say what these shells are a copy of; tensors, storages and digests stay."""
        self.manifest = replace(
            self.manifest,
            model=identity.model,
            revision=identity.revision,
            config=identity.config,
            checkpoint=identity.checkpoint,
        )

    def describe(self, layouts: Mapping[str, str]) -> None:
        """Put layout fingerprints, by runtime name, into the manifest; tensors that are not named keep theirs."""
        entries = (replace(tensor, layout=layouts.get(tensor.name, tensor.layout)) for tensor in self.manifest.tensors)
        self.manifest = replace(self.manifest, tensors=tuple(entries))

    def fill(self, byte: int) -> None:
        """Set every byte of every storage, to touch the pages or to make unwritten ones visible."""
        for storage in self._storages:
            storage.fill_(byte)


def _module_tensors(module: torch.nn.Module, non_persistent: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            yield dot + name, parameter.data
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if non_persistent or name not in child._non_persistent_buffers_set:
                yield dot + name, buffer


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is not plain memory of this process, before anything is read or written."""
    wrong = None
    if tensor.device.type != "cpu":
        wrong = f"lies on device {tensor.device}, expected the CPU"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
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


def _cut_storage(tensors: Iterable[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """The part of a common allocation that `tensors` span: its first byte, and a flat uint8 view of it.

    What lies before and after belongs to others and is neither served nor hashed.
    """
    spans = [(_elements(tensor), tensor) for tensor in tensors]
    filled = [(region.in_bytes(tensor.itemsize), tensor) for region, tensor in spans if region.numel]
    begin = min((region.offset for region, _ in filled), default=0) // _BASE_ALIGNMENT_BYTES * _BASE_ALIGNMENT_BYTES
    end = max((region.end for region, _ in filled), default=begin)
    allocation = spans[0][1].untyped_storage()
    return begin, torch.empty(0, dtype=torch.uint8).set_(allocation, begin, (end - begin,), (1,))


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
        placement=place_whole(name, region),
    )
