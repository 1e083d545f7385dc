"""Positional reads from files that must still be the ones whose headers were read."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weightwire.transfer.checkpoint.regular_files import (
    FileIdentity,
    identity_of,
    open_regular,
    printable,
    read_at,
    refusal_for,
    subject_of,
)
from weightwire.transfer.errors import CheckpointError

# Checkpoints have thousands of files, and processes often no more than a thousand descriptors for all they do.
MOST_OPEN = 64


@dataclass(slots=True)
class _OpenFile:
    fd: int
    readers: int = 0


class PinnedFiles:
    """A set of files, each opened when it is read. Threads may read at the same time.

    The files that were read last stay open, `MOST_OPEN` of them. Closing never takes a descriptor from under a read:
    the last one that is under way closes it.
    """

    def __init__(self, identities: Mapping[Path, FileIdentity]) -> None:
        self._identities = identities
        self._lock = threading.Lock()
        # The one that was read last is the last.
        self._open = dict[Path, _OpenFile]()
        self._closed = False
        self._bytes_read = 0
        self._is_scattered = False

    @property
    def bytes_read(self) -> int:
        """Bytes that positional reads have delivered so far; what mappings touched is not known."""
        return self._bytes_read

    def read_into(self, file: Path, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` (contiguous bytes, writable) from byte `offset` of `file` on.

        Returns:
            The bytes read, fewer than asked for only at the end of the file.

        Raises:
            CheckpointError: If the file has changed since it was pinned, or cannot be read. What `buffer` then
                holds is worthless.
            ValueError: After `close`.
        """
        with self._descriptor(file) as fd:
            try:
                count = read_at(fd, offset, buffer)
            except OSError as error:
                raise refusal_for(file, error) from error
            # After the read, so that no write which came before it goes unseen; a file that was replaced before it
            # was opened shows here too.
            self._check_same(file, identity_of(fd))
        with self._lock:
            self._bytes_read += count
        return count

    @contextmanager
    def mapped(self, file: Path, offset: int, nbytes: int) -> Iterator[mmap.mmap]:
        """A private mapping of at least `nbytes` of `file`, for as long as the block runs.

        Its first byte is byte `offset - offset % mmap.ALLOCATIONGRANULARITY` of the file. A write to it does not reach
        the file. Nothing may refer to it after the block. The file is checked before and after; a file that is cut
        short within the block kills the process, as it does with every mapping.

        Raises:
            CheckpointError: If the file has changed since it was pinned, or cannot be mapped.
            ValueError: After `close`.
        """
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        with self._descriptor(file) as fd:
            self._check_same(file, identity_of(fd))
            try:
                mapping = mmap.mmap(fd, offset + nbytes - begin, access=mmap.ACCESS_COPY, offset=begin)
            except OSError as error:
                raise refusal_for(file, error) from error
            with mapping:
                yield mapping
            self._check_same(file, identity_of(fd))

    def expect_scattered_reads(self) -> None:
        """Tell the kernel that positional reads take pieces of the files, so that it reads nothing around them."""
        with self._lock:
            self._is_scattered = True
            for opened in self._open.values():
                _advise_scattered(opened.fd)

    def close(self) -> None:
        """Refuse further reads. May be called again."""
        with self._lock:
            self._closed = True
            self._close_idle(keep=0)

    @contextmanager
    def _descriptor(self, file: Path) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{subject_of(file)}: read after close")
            opened = self._open.pop(file, None) or self._opened(file)
            self._open[file] = opened
            opened.readers += 1
        try:
            yield opened.fd
        finally:
            with self._lock:
                opened.readers -= 1
                self._close_idle(keep=self._most_kept)

    @property
    def _most_kept(self) -> int:
        return 0 if self._closed else MOST_OPEN

    def _opened(self, file: Path) -> _OpenFile:
        self._close_idle(keep=MOST_OPEN - 1)
        fd, _ = open_regular(file)
        if self._is_scattered:
            _advise_scattered(fd)
        return _OpenFile(fd)

    def _check_same(self, file: Path, found: FileIdentity) -> None:
        pinned = self._identities[file]
        if found != pinned:
            raise CheckpointError(
                f"{subject_of(file)}: changed on disk since its header was read: {_differences(pinned, found)}",
                path=printable(file),
            )

    def _close_idle(self, *, keep: int) -> None:
        """Close files that nobody reads until `keep` are open, those first that were not read for the longest time."""
        surplus = len(self._open) - keep
        if surplus <= 0:
            return
        idle = [file for file, opened in self._open.items() if not opened.readers]
        for file in idle[:surplus]:
            os.close(self._open.pop(file).fd)


def _advise_scattered(fd: int) -> None:
    # Advice: a file system that does not take it reads more than it has to, and no other bytes.
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def _differences(pinned: FileIdentity, found: FileIdentity) -> str:
    if found.size != pinned.size:
        return f"it has {found.size} bytes, expected {pinned.size}"
    if (found.device, found.inode) != (pinned.device, pinned.inode):
        return f"it is another file (inode {found.inode}, expected {pinned.inode})"
    return f"it was modified at {found.mtime_ns} ns, expected {pinned.mtime_ns} ns"
