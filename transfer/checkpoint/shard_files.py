"""One safetensors file of a checkpoint, opened: mapped from the page cache, or read into memory.

Its header was read and checked before, together with what the file was then; a file that is another one since is
refused before each tensor. What no check can exclude: a *mapped* file that somebody cuts short while a tensor of it is
in use. The kernel then kills the process with SIGBUS, so files of a checkpoint are replaced by renaming, never
rewritten in place; where that cannot be had, read without mmap.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from weightwire.transfer.checkpoint.page_cache import read_ahead
from weightwire.transfer.checkpoint.reader import read_header
from weightwire.transfer.checkpoint.regular_files import (
    FileIdentity,
    identity_of,
    opened_regular,
    printable,
    read_at,
    refusal_for,
    subject_of,
)
from weightwire.transfer.checkpoint.safetensors_format import Header, HeaderEntry
from weightwire.transfer.errors import CancelledError, CheckpointError
from weightwire.transfer.intervals import IntervalSet

# One read of a file that is not mapped; whoever closes the reader waits for no more than this.
_BLOCK_BYTES = 16 << 20
# Not worth a mapping of its own.
_SMALL_BYTES = 1 << 20

IsStopped = Callable[[], bool]


class Shard(Protocol):
    """An opened file; its memory goes when the shard and all its tensors are gone."""

    @property
    def file(self) -> Path: ...

    @property
    def names(self) -> tuple[str, ...]:
        """What can be taken, sorted."""
        ...

    def take(self, name: str) -> torch.Tensor:
        """One tensor, each at most once; the shard keeps no reference to it.

        Raises:
            CheckpointError: If the file has changed since it was opened.
        """
        ...

    def mapping(self) -> mmap.mmap | None:
        """The mapping that tensors of this shard share, if it is one of ours."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """The checked header of one file.

    Attributes:
        file: The file.
        header: What it says.
        identity: What the file was when the header was read.
    """

    file: Path
    header: Header
    identity: FileIdentity


def read_headers(files: Iterable[Path]) -> tuple[FileHeader, ...]:
    """Read and check the header of every file; no payload is touched.

    Raises:
        CheckpointError: If a file cannot be read, or its header is refused.
        DtypeError: If a dtype's tag is unknown.
    """
    headers = list[FileHeader]()
    for file in files:
        header, identity = read_header(file)
        headers.append(FileHeader(file=file, header=header, identity=identity))
    return tuple(headers)


class MappedShard:
    """Tensors are views of the page cache, shared with every process that maps the file.

    The mapping is private and writable: a stray write changes this process's copy of a page, never the file.
    """

    def __init__(self, source: FileHeader, names: Collection[str], mapping: mmap.mmap) -> None:
        self.file = source.file
        self.names = tuple(sorted(names))
        self._source = source
        self._mapping = mapping

    def take(self, name: str) -> torch.Tensor:
        check_unchanged(self.file, self._source.identity)
        entry = self._source.header.by_name[name]
        dtype = entry.dtype.torch_dtype
        # torch refuses buffers without elements.
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        begin = self._source.header.data_begin + entry.begin
        flat = torch.frombuffer(self._mapping, dtype=torch.uint8, count=entry.nbytes, offset=begin)
        aligned = flat if begin % entry.dtype.itemsize == 0 else flat.clone()
        return aligned.view(dtype).view(entry.shape)

    def mapping(self) -> mmap.mmap | None:
        return self._mapping


class LoadedShard:
    """Tensors that were all made when the file was opened."""

    def __init__(self, file: Path, tensors: dict[str, torch.Tensor], *, backed_by: FileIdentity | None = None) -> None:
        """
        Args:
            file: Where they come from.
            tensors: Taken over, not copied.
            backed_by: What the file was, if their memory is a mapping of it.
        """
        self.file = file
        self.names = tuple(sorted(tensors))
        self._tensors = tensors
        self._identity = backed_by

    def take(self, name: str) -> torch.Tensor:
        if self._identity is not None:
            check_unchanged(self.file, self._identity)
        return self._tensors.pop(name)

    def mapping(self) -> mmap.mmap | None:
        return None


def map_shard(source: FileHeader, names: Collection[str], *, warm: bool, is_stopped: IsStopped) -> MappedShard:
    """Map a file.

    Args:
        source: Its header.
        names: What can be taken of it.
        warm: Read what is wanted, and nothing else, into the page cache first.
        is_stopped: Asked between blocks.

    Raises:
        CheckpointError: If the file has changed since its header was read, or cannot be read.
        CancelledError: If `is_stopped` says so.
    """
    with _opened_unchanged(source) as fd:
        try:
            mapping = mmap.mmap(fd, source.identity.size, access=mmap.ACCESS_COPY)
        except ValueError as error:
            # Shorter than that by now.
            raise _cut_short(source, identity_of(fd).size) from error
        missing = read_ahead(fd, _ranges(source, names), is_stopped=is_stopped) if warm else None
        _check_same(source.file, source.identity, identity_of(fd))
    if missing is not None:
        raise _cut_short(source, missing)
    return MappedShard(source, names, mapping)


def read_shard(source: FileHeader, names: Collection[str], *, is_stopped: IsStopped) -> LoadedShard:
    """Read the wanted tensors of a file into memory of their own, straight, without raw bytes beside them.

    Args:
        source: Its header.
        names: What is wanted.
        is_stopped: Asked between blocks.

    Raises:
        CheckpointError: If the file has changed since its header was read, or cannot be read.
        CancelledError: If `is_stopped` says so.
    """
    tensors = dict[str, torch.Tensor]()
    with _opened_unchanged(source) as fd:
        for entry in _entries(source, names):
            flat = _own_memory(entry.nbytes)
            begin = source.header.data_begin + entry.begin
            got = _read(fd, begin, flat.numpy().data, is_stopped=is_stopped)
            if got != entry.nbytes:
                raise _cut_short(source, begin + got)
            tensors[entry.name] = flat.view(entry.dtype.torch_dtype).view(entry.shape)
        # After the reads, so that no write which came before them goes unseen.
        _check_same(source.file, source.identity, identity_of(fd))
    return LoadedShard(source.file, tensors)


def check_unchanged(file: Path, expected: FileIdentity) -> None:
    """Refuse a file that was replaced, rewritten, cut short or removed.

    Raises:
        CheckpointError: If it is not what it was.
    """
    try:
        status = os.stat(file)
    except OSError as error:
        raise refusal_for(file, error) from error
    found = FileIdentity(device=status.st_dev, inode=status.st_ino, size=status.st_size, mtime_ns=status.st_mtime_ns)
    _check_same(file, expected, found)


def _check_same(file: Path, expected: FileIdentity, found: FileIdentity) -> None:
    if found != expected:
        what = (
            f"it has {found.size} bytes, expected {expected.size}"
            if found.size != expected.size
            else "it was rewritten or replaced"
        )
        raise CheckpointError(
            f"{subject_of(file)}: changed on disk since its header was read: {what}",
            path=printable(file),
            expected_bytes=expected.size,
            actual_bytes=found.size,
        )


@contextmanager
def _opened_unchanged(source: FileHeader) -> Iterator[int]:
    """Descriptor of the file, if it still is what it was when its header was read; what the system refuses is ours."""
    with opened_regular(source.file) as (fd, identity):
        _check_same(source.file, source.identity, identity)
        try:
            yield fd
        except OSError as error:
            raise refusal_for(source.file, error) from error


def _entries(source: FileHeader, names: Collection[str]) -> list[HeaderEntry]:
    """The entries of `names` in the order of the file, so that the disk is read front to back."""
    return sorted((source.header.by_name[name] for name in names), key=lambda entry: (entry.begin, entry.end))


def _ranges(source: FileHeader, names: Collection[str]) -> list[tuple[int, int]]:
    """Byte ranges of the file that hold `names`; neighbours are one range."""
    first = source.header.data_begin
    return list(IntervalSet((first + entry.begin, first + entry.end) for entry in _entries(source, names)))


def _own_memory(nbytes: int) -> torch.Tensor:
    """Bytes that go back to the system with their tensor.

    What the allocator of C gives to many threads it keeps for them when it is freed, some tens of MiB for each.
    """
    if nbytes < _SMALL_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _read(fd: int, offset: int, buffer: memoryview, *, is_stopped: IsStopped) -> int:
    """`read_at` that can be stopped between blocks."""
    for begin in range(0, len(buffer), _BLOCK_BYTES):
        if is_stopped():
            raise CancelledError("reader: stopped")
        block = buffer[begin : begin + _BLOCK_BYTES]
        got = read_at(fd, offset + begin, block)
        if got != len(block):
            return begin + got
    return len(buffer)


def _cut_short(source: FileHeader, end: int) -> CheckpointError:
    return CheckpointError(
        f"{subject_of(source.file)}: ends at byte {end}, expected {source.identity.size}",
        path=printable(source.file),
        expected_bytes=source.identity.size,
        actual_bytes=end,
    )
