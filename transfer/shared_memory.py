"""Storages that another process can map, by descriptors of files in memory that have no name and end with their users.

Nothing is left behind when a process is killed: the kernel frees a file of this kind with its last descriptor.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weightwire.transfer.errors import AdmissionError

# Of each storage, as an allocator would align it.
_ALIGNMENT_BYTES = 64
_SHM_FOLDER = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Where one storage lies: in the file of this number, from `offset` on."""

    file: int
    offset: int
    nbytes: int


class SharedFiles:
    """Descriptors of files in memory, and where in them the storages of one rank lie, in order.

    Attributes:
        descriptors: Owned; closed when this object goes.
    """

    def __init__(self, descriptors: Sequence[int], ranges: Sequence[FileRange]) -> None:
        self.descriptors = tuple(descriptors)
        self.ranges = tuple(ranges)
        weakref.finalize(self, _close, self.descriptors)


def allocate_storages(sizes: Iterable[int]) -> tuple[list[torch.Tensor], SharedFiles]:
    """One flat uint8 tensor for each size, in one file; memory is not touched.

    The file is bounded by memory alone, not by the size of a mounted /dev/shm.
    """
    ranges = list[FileRange]()
    end = 0
    for nbytes in sizes:
        ranges.append(FileRange(file=0, offset=end, nbytes=nbytes))
        end += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    descriptor = os.memfd_create("weightwire", os.MFD_CLOEXEC)
    files = SharedFiles([descriptor], ranges)
    os.ftruncate(descriptor, max(end, 1))
    return _views(files, writable=True), files


def share_storages(storages: Sequence[torch.Tensor]) -> SharedFiles:
    """Move the memory behind flat uint8 tensors into shared files, in place: every tensor over it moves along.

    Addresses change: whoever keeps one, as a numpy array or a raw pointer does, keeps memory that is gone. One storage
    after the other is copied, so that no more than the largest one is there twice.

    Raises:
        AdmissionError: If /dev/shm has no room for it; nothing was moved.
    """
    whole = {storage.untyped_storage().data_ptr(): storage.untyped_storage() for storage in storages if len(storage)}
    _check_room(sum(memory.nbytes() for memory in whole.values() if not memory.is_shared()))
    numbers = dict[int, int]()
    descriptors = list[int]()
    ranges = list[FileRange]()
    for storage in storages:
        if not len(storage):
            ranges.append(FileRange(file=0, offset=0, nbytes=0))
            continue
        memory = storage.untyped_storage()
        if memory.data_ptr() not in numbers:
            # torch's own descriptor goes with the storage; a reader may outlive that.
            descriptor, _ = memory._share_fd_cpu_()
            numbers[memory.data_ptr()] = len(descriptors)
            descriptors.append(os.dup(descriptor))
        ranges.append(
            FileRange(file=numbers[memory.data_ptr()], offset=int(storage.storage_offset()), nbytes=storage.numel())
        )
    return SharedFiles(descriptors, ranges)


def open_storages(files: SharedFiles) -> list[torch.Tensor]:
    """The storages that another process shared, to be read alone: writing to one ends the process."""
    return _views(files, writable=False)


def _views(files: SharedFiles, *, writable: bool) -> list[torch.Tensor]:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    maps = [mmap.mmap(descriptor, 0, access=access) for descriptor in files.descriptors]
    with warnings.catch_warnings():
        # That memory cannot be written is what is wanted here.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return [
            torch.frombuffer(maps[part.file], dtype=torch.uint8, offset=part.offset, count=part.nbytes)
            if part.nbytes
            else torch.empty(0, dtype=torch.uint8)
            for part in files.ranges
        ]


def _check_room(nbytes: int) -> None:
    room = os.statvfs(_SHM_FOLDER)
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        raise AdmissionError(
            f"shared memory: needs {nbytes} bytes, {_SHM_FOLDER} has {free}; expected a larger one, or shells that "
            "were allocated as shared",
            needed_bytes=nbytes,
            available_bytes=free,
        )


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
