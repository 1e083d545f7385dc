"""Opens regular files and nothing else: a FIFO, a device or a directory is refused, never waited for."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightwire.transfer.errors import CheckpointError, CheckpointNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """What changes when somebody replaces or rewrites a file.

    Attributes:
        size: In bytes.
        mtime_ns: Last modification, nanoseconds since the epoch.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int


def printable(path: Path) -> str:
    """`path` as text that every log and every JSON encoder takes, undecodable bytes escaped."""
    return str(path).encode("utf-8", "backslashreplace").decode("utf-8")


def subject_of(path: Path) -> str:
    """How messages name `path`: `file '/m/model.safetensors'`."""
    return f"file {printable(path)!r}"


def open_regular(path: Path) -> tuple[int, FileIdentity]:
    """Open `path` for reading; the caller closes the descriptor.

    Raises:
        CheckpointNotFoundError: If it is absent, or a link to something absent.
        CheckpointError: If it is not a regular file, or may not be read.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer that may never come.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            # What a socket answers, which says nothing to a reader.
            check_regular(path, os.stat(path))
        raise refusal_for(path, error) from error
    try:
        check_regular(path, os.fstat(fd))
        return fd, identity_of(fd)
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def opened_regular(path: Path) -> Iterator[tuple[int, FileIdentity]]:
    """`open_regular`, closed at the end of the block."""
    fd, identity = open_regular(path)
    try:
        yield fd, identity
    finally:
        os.close(fd)


def identity_of(fd: int) -> FileIdentity:
    """Identity of the open file as it is now."""
    status = os.fstat(fd)
    return FileIdentity(device=status.st_dev, inode=status.st_ino, size=status.st_size, mtime_ns=status.st_mtime_ns)


def check_regular(path: Path, status: os.stat_result) -> None:
    """Raise CheckpointError unless `status`, that of `path`, is a regular file's."""
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"{subject_of(path)}: is {_KINDS.get(stat.S_IFMT(status.st_mode), 'special')}, expected a regular file",
            path=printable(path),
        )


def read_at(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` (contiguous bytes, writable) from `offset` on; returns the bytes read, fewer only at the end."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_text(path: Path, *, max_bytes: int) -> str:
    """The whole of a small UTF-8 file, its line ends untouched.

    Raises:
        CheckpointNotFoundError: If it is absent, or a link to something absent.
        CheckpointError: If it is longer than `max_bytes`, not UTF-8, or cannot be read.
    """
    raw = read_bytes(path, max_bytes=max_bytes)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{subject_of(path)}: is not UTF-8: {error}", path=printable(path)) from error


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The whole of a small file.

    Raises:
        CheckpointNotFoundError: If it is absent, or a link to something absent.
        CheckpointError: If it is longer than `max_bytes`, or cannot be read.
    """
    with opened_regular(path) as (fd, identity):
        if identity.size > max_bytes:
            raise CheckpointError(
                f"{subject_of(path)}: has {identity.size} bytes, expected at most {max_bytes}", path=printable(path)
            )
        buffer = bytearray(identity.size)
        try:
            count = read_at(fd, 0, memoryview(buffer))
        except OSError as error:
            raise refusal_for(path, error) from error
        return bytes(buffer[:count])


def refusal_for(path: Path, error: OSError) -> CheckpointError:
    """The error of ours that says what the operating system said about `path`."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        what = "is a link whose target is absent" if os.path.islink(path) else "is absent"
        return CheckpointNotFoundError(f"{subject_of(path)}: {what}", path=printable(path))
    return CheckpointError(f"{subject_of(path)}: cannot be read: {error.strerror}", path=printable(path))


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
