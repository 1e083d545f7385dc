"""A rank's storages: what a target fills and a source serves.

`Shells` ties a manifest to memory. Tensors are views into storages, and storages lie one after the other in the
rank's flat space, so that a transfer sees byte ranges and never a tensor.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from weightwire.transfer.device_shells import Departure, Landing, Span, WhileStuck
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.errors import ManifestError, NotFoundError
from weightwire.transfer.integrity import DIGEST_BYTES, checksum, digest_text
from weightwire.transfer.layouts import Layout, ModelIdentity, identified
from weightwire.transfer.manifest import DEFAULT_CHUNK_BYTES, Manifest, TensorEntry
from weightwire.transfer.placement import PlacedConstant
from weightwire.transfer.regions import Region
from weightwire.transfer.shared_memory import SharedFiles, allocate_storages, share_storages
from weightwire.transfer.staging import DEVICE_TYPES, HostDevice, Staging, as_device_errors, await_marks


class Shells:
    """The storages of one rank, on the CPU or a device, and the manifest that describes them.

    Plain memory is the CPU's: views of it are handed out. What lies on a device is copied through pinned buffers.

    Attributes:
        manifest: Without digests until `seal` is called.
        devices: By what means memory is reached that is not plain; empty if all of it is.
        shared: Where the storages lie, if other processes can map them.
    """

    def __init__(
        self,
        manifest: Manifest,
        storages: Iterable[torch.Tensor],
        staging: Staging | None = None,
        *,
        shared: SharedFiles | None = None,
    ) -> None:
        """Args:
        manifest: Describes `storages`.
        storages: One flat, contiguous uint8 tensor for each storage of the manifest. Kept, not copied.
        staging: Which of them count as plain memory; by default those on the CPU.
        shared: Where these lie, if other processes can map them.
        """
        self.manifest = manifest
        self.shared = shared
        self._storages = list(storages)
        sizes = tuple(storage.numel() for storage in self._storages)
        if sizes != manifest.storages:
            raise ManifestError(f"shells: storages of {sizes} bytes, the manifest has {manifest.storages}")
        # Empty storages own no flat address; leaving them out makes a chunk's views a plain slice of a list.
        self._filled = [storage for storage in self._storages if storage.numel()]
        self._bases = list(accumulate((storage.numel() for storage in self._filled), initial=0))
        self.devices = (staging or Staging()).devices(storage.device for storage in self._filled)
        self._plain = [storage.device not in self.devices for storage in self._filled]
        self._views = self._memory()

    def _memory(self) -> list[memoryview]:
        # Of what is not plain there is nothing to be seen.
        return [
            storage.numpy().data if plain else memoryview(b"")
            for storage, plain in zip(self._filled, self._plain, strict=True)
        ]

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        identity: ModelIdentity | None = None,
        *,
        non_persistent: bool = False,
    ) -> Shells:
        """The parameters and buffers of `module`, in place; tied ones share a storage, so they move once.

        Args:
            module: On the CPU, on CUDA devices, or both. Its tensors are written where they lie: data pointers,
                strides and ties stay. Each is taken for the checkpoint's tensor of the same name, whole.
            identity: Of the model; without it a nameless one.
            non_persistent: Also take buffers that a checkpoint would not hold.

        Raises:
            ManifestError: If a tensor is not plain memory (meta, sparse, quantised, conjugated, of another device).
            DtypeError: If a dtype may not travel.
        """
        return cls.from_tensors(tensors_of(module, non_persistent=non_persistent), identity)

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
        return cls.from_layout(Layout.of(tensors, identity or ModelIdentity(model=""), chunk_bytes=chunk_bytes))

    @classmethod
    def from_layout(cls, layout: Layout) -> Shells:
        """The tensors of a layout, in place.

        Raises:
            ManifestError: If one of them has no memory, or on a device that nobody here copies from.
        """
        for tensor in layout.manifest.tensors:
            device = layout.cuts[tensor.storage][0].device
            if device.type not in DEVICE_TYPES:
                raise ManifestError(
                    f"tensor {tensor.name!r}: lies on device {device}, expected {' or '.join(DEVICE_TYPES)}",
                    tensor=tensor.name,
                )
        storages = [
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                tensor.untyped_storage(), begin, (end - begin,), (1,)
            )
            for tensor, begin, end in layout.cuts
        ]
        return cls(layout.manifest, storages)

    @classmethod
    def allocate(cls, manifest: Manifest, *, shared: bool = False) -> Shells:
        """Empty shells of a manifest's layout, with its aliases, and without its digests.

        Memory is not touched: pages appear as they are written.

        Args:
            shared: In memory that a `SourceProcess` can serve.
        """
        entries = tuple(replace(tensor, digest="") for tensor in manifest.tensors)
        bare = replace(manifest, tensors=entries, chunk_digests=b"")
        if shared:
            storages, files = allocate_storages(manifest.storages)
            return cls(bare, storages, shared=files)
        # numpy's memory has huge pages where the kernel gives them to those who ask; torch's has not, by default.
        return cls(bare, [torch.from_numpy(np.empty(nbytes, dtype=np.uint8)) for nbytes in manifest.storages])

    def share(self) -> SharedFiles:
        """Move the storages into memory that other processes can map, in place, unless they lie there already.

        Every torch tensor over them moves along; addresses, and numpy arrays over them, do not: nobody may use those
        any more, nor `views` that were asked for before. Not to be called while bytes move.

        Raises:
            ValueError: If some of it is not plain memory.
            AdmissionError: If there is no room for it; nothing was moved.
        """
        if self.devices:
            raise ValueError("shells: some of them lie on a device, expected plain memory to share")
        if self.shared is None:
            self.shared = share_storages(self._storages)
            self._views = self._memory()
        return self.shared

    def through(self, staging: Staging) -> Shells:
        """The same memory and manifest, reached in another way."""
        return Shells(self.manifest, self._storages, staging, shared=self.shared)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that runtime name: a view, dtype, shape and strides as the manifest says.

        Raises:
            NotFoundError: If the manifest has no such tensor.
        """
        entry = self.manifest.by_name.get(name)
        if entry is None:
            raise NotFoundError(f"tensor {name!r}: not among the {len(self.manifest.tensors)} here", kind="tensor")
        return self._view(entry, entry.region)

    def _view(self, entry: TensorEntry, region: Region) -> torch.Tensor:
        """Elements of the storage that a tensor lies in, as that tensor has them."""
        storage = self._storages[entry.storage]
        first = storage.storage_offset() // entry.itemsize
        empty = torch.empty(0, dtype=dtype_named(entry.dtype).torch_dtype, device=storage.device)
        return empty.set_(storage.untyped_storage(), first + region.offset, region.shape, region.strides)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, aliases included, in the manifest's order."""
        for entry in self.manifest.tensors:
            yield entry.name, self.tensor(entry.name)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """The memory behind flat bytes `begin` to `end`: writable views, in order, none of them empty.

        Raises:
            ValueError: If some of it is not plain.
        """
        if begin >= end:
            return []
        if self.devices and not self._are_plain(begin, end):
            raise ValueError(f"shells: bytes {begin} to {end} lie on a device, expected plain memory")
        first = bisect_right(self._bases, begin) - 1
        last = bisect_right(self._bases, end - 1) - 1
        views = self._views[first : last + 1]
        if end != self._bases[last + 1]:
            views[-1] = views[-1][: end - self._bases[last]]
        if begin != self._bases[first]:
            views[0] = views[0][begin - self._bases[first] :]
        return views

    def direct(self, begin: int, end: int) -> memoryview | None:
        """The memory behind flat bytes, where they are in one piece, and none of these shells is on a device: then
        frames are received ahead of the one that is copied, which nobody may see in the shells yet.
        """
        if self.devices:
            return None
        views = self.views(begin, end)
        return views[0] if len(views) == 1 else None

    def is_plain(self, region: Region) -> bool:
        """Whether all memory from the first to the last byte of a flat region is plain."""
        return not self.devices or self._are_plain(region.offset, region.end)

    def _are_plain(self, begin: int, end: int) -> bool:
        if begin >= end:
            return True
        return all(self._plain[bisect_right(self._bases, begin) - 1 : bisect_right(self._bases, end - 1)])

    def box(self, region: Region) -> torch.Tensor:
        """A strided uint8 view of a flat region, in bytes, that lies in one storage; on its device."""
        at = bisect_right(self._bases, region.offset) - 1
        storage = self._filled[at]
        first = int(storage.storage_offset()) + region.offset - self._bases[at]
        return storage.as_strided(region.shape, region.strides, first)

    def parts(self, region: Region, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The memory of bytes `begin` to `end` of a flat region in row-major order: uint8 views on their devices."""
        if not region.is_contiguous:
            yield from (self.box(part.coalesced()) for part in region.packed(begin, end))
            return
        at, stop = region.offset + begin, region.offset + end
        while at < stop:
            number = bisect_right(self._bases, at) - 1
            until = min(stop, self._bases[number + 1])
            yield self._filled[number][at - self._bases[number] : until - self._bases[number]]
            at = until

    def gather(self, region: Region, begin: int = 0, end: int | None = None) -> list[memoryview]:
        """Bytes `begin` to `end` of a flat region in row-major order.

        Views of the storages where the region is contiguous and plain, else a copy of `end - begin` bytes.

        Raises:
            DeviceError: If it cannot be copied from its device.
        """
        end = region.numel if end is None else end
        if not self.is_plain(region):
            with Departure(self, end - begin) as departure:
                return departure.gather([(region, begin, end)])
        if region.is_contiguous:
            return self.views(region.offset + begin, region.offset + end)
        return [np.ascontiguousarray(self._array(part)).reshape(-1).data for part in region.packed(begin, end)]

    def scatter(self, packed: memoryview, region: Region, begin: int) -> None:
        """Write `packed` over bytes `begin` and following of a flat region, in row-major order.

        Raises:
            DeviceError: If it cannot be copied to its device.
        """
        taken = 0
        if not self.is_plain(region):
            source = torch.frombuffer(packed, dtype=torch.uint8)
            for view in self.parts(region, begin, begin + len(packed)):
                self.put(view, source[taken : (taken := taken + view.numel())].view(view.shape))
            return
        if region.is_contiguous:
            for memory in self.views(region.offset + begin, region.offset + begin + len(packed)):
                memory[:] = packed[taken : (taken := taken + len(memory))]
            return
        raw = np.frombuffer(packed, dtype=np.uint8)
        for part in region.packed(begin, begin + len(packed)):
            np.copyto(self._array(part), raw[taken : taken + part.numel].reshape(part.shape))
            taken += part.numel

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target <- source`, whatever their dtypes; returns when it is done.

        Args:
            target: A view of these shells, on its device.
            source: On the CPU, not pinned.

        Raises:
            DeviceError: If it cannot be copied.
        """
        with as_device_errors():
            copier = self.devices.get(target.device, HostDevice()).copier()
            copier.copy(target, source)
            await_marks([copier.mark()])

    def _array(self, region: Region) -> npt.NDArray[np.uint8]:
        """A strided view of a flat region, in bytes, that lies in one storage.

        By numpy, which copies in the thread that asks: torch would wake a pool of threads for each chunk, and they
        would wait for each other while other streams have the cores.
        """
        at = bisect_right(self._bases, region.offset) - 1
        offset = region.offset - self._bases[at]
        return np.ndarray(region.shape, np.uint8, self._views[at], offset, region.strides)

    def landing(self, nbytes: int, while_stuck: WhileStuck = contextlib.nullcontext) -> Landing:
        """A way in for one connection, whose largest frame has so many bytes; see `Landing`."""
        return Landing(self, nbytes, while_stuck)

    def departure(self) -> Departure:
        """A way out for one reader, in frames of at most a chunk."""
        return Departure(self, self.manifest.chunk_bytes)

    def steps(self, region: Region, begin: int = 0, end: int | None = None) -> Iterator[list[memoryview]]:
        """What `gather` gives, a chunk at a time; views are good until the next are asked for."""
        step, end = self.manifest.chunk_bytes, region.numel if end is None else end
        with self.departure() as departure:
            yield from departure.each([(region, at, min(at + step, end))] for at in range(begin, end, step))

    def fence(self) -> None:
        """Let every copy from now on see, or overwrite, what the calling thread's stream has been told to write."""
        for device in self.devices.values():
            device.fence()

    def digest(self, name: str) -> str:
        """xxh3-64 of a tensor's bytes in row-major order, computed now."""
        region = self.manifest.flat_region(self.manifest.by_name[name])
        return digest_text(checksum(view for views in self.steps(region) for view in views))

    def seal(self, on_bytes: Callable[[int], None] = lambda _: None) -> Manifest:
        """Compute the digests of every chunk and tensor and put them into the manifest.

        Args:
            on_bytes: Called with the bytes of each chunk that is done.
        """
        self.fence()
        entries = tuple(replace(tensor, digest=self.digest(tensor.name)) for tensor in self.manifest.tensors)
        digests = bytearray()
        with self.departure() as departure:
            for views in departure.each(self._chunks()):
                digests += checksum(views).to_bytes(DIGEST_BYTES, "big")
                on_bytes(sum(map(len, views)))
        self.manifest = replace(self.manifest, tensors=entries, chunk_digests=bytes(digests))
        return self.manifest

    def _chunks(self) -> Iterator[Sequence[Span]]:
        """Every chunk of the flat space, as a frame."""
        for begin, end in pairwise(self.manifest.chunk_bounds):
            yield [(Region(offset=begin, shape=(end - begin,), strides=(1,)), 0, end - begin)]

    def identify(self, identity: ModelIdentity) -> None:
        """Say what these shells are a copy of; tensors, storages and digests stay."""
        self.manifest = identified(self.manifest, identity)

    def fill_constant(self, name: str, constant: PlacedConstant) -> None:
        """Write a constant region of a tensor, on a device by the calling thread's stream."""
        self._view(self.manifest.by_name[name], constant.runtime).fill_(constant.value)
        self.fence()

    def fill(self, byte: int) -> None:
        """Set every byte of every storage, to touch the pages or to make unwritten ones visible."""
        for storage in self._storages:
            storage.fill_(byte)
        self.fence()


def tensors_of(module: torch.nn.Module, *, non_persistent: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name that they have, module by module.

    Args:
        module: On any device.
        non_persistent: Also take buffers that a checkpoint would not hold.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            found[dot + name] = parameter.data
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if non_persistent or name not in child._non_persistent_buffers_set:
                found[dot + name] = buffer
    return found
