"""Positional reads from files that must still be the ones whose headers were read."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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


class PinnedFiles:
    """A set of files, each opened at its first read and kept open. Threads may read at the same time.

    Closing never takes a descriptor from under a read: the last read that is under way closes them.
    """

    def __init__(self, identities: Mapping[Path, FileIdentity]) -> None:
        self._identities = identities
        self._lock = threading.Lock()
        self._fds = dict[Path, int]()
        self._readers = 0
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
            for fd in self._fds.values():
                _advise_scattered(fd)

    def close(self) -> None:
        """Refuse further reads. May be called again."""
        with self._lock:
            self._closed = True
            self._close_if_idle()

    @contextmanager
    def _descriptor(self, file: Path) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{subject_of(file)}: read after close")
            if file not in self._fds:
                self._fds[file], _ = open_regular(file)
                if self._is_scattered:
                    _advise_scattered(self._fds[file])
            fd = self._fds[file]
            self._readers += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._readers -= 1
                self._close_if_idle()

    def _check_same(self, file: Path, found: FileIdentity) -> None:
        pinned = self._identities[file]
        if found != pinned:
            raise CheckpointError(
                f"{subject_of(file)}: changed on disk since its header was read: {_differences(pinned, found)}",
                path=printable(file),
            )

    def _close_if_idle(self) -> None:
        if self._closed and not self._readers:
            while self._fds:
                os.close(self._fds.popitem()[1])


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
