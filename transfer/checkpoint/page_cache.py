"""Puts file ranges into the kernel's page cache before they are needed, and takes files out after."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from weightwire.transfer.checkpoint.regular_files import opened_regular, printable, read_at
from weightwire.transfer.errors import CancelledError, CheckpointError

_LOG = logging.getLogger(__name__)

# One read; two questions to the kernel for each, so not much smaller, or asking costs the consumer's time.
_BLOCK_BYTES = 4 << 20

Advise = Callable[[int], None]


def _dont_need() -> Advise | None:
    """How this platform is told that a file's pages are not needed; None if it cannot be."""
    advise = getattr(os, "posix_fadvise", None)
    return None if advise is None else lambda fd: advise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


DONT_NEED = _dont_need()


def drop_page_cache(file: Path, *, advise: Advise | None = DONT_NEED) -> None:
    """Tell the kernel that nobody here needs the pages of `file`.

    It keeps those that are mapped anywhere. Failure is only logged: nothing depends on it.

    Args:
        file: Its dirty pages, if any, stay too.
        advise: Says so for an open file; None does nothing.
    """
    if advise is None:
        return
    try:
        with opened_regular(file) as (fd, _):
            advise(fd)
    except (OSError, CheckpointError) as error:
        _LOG.debug("file %r: page cache not dropped: %s", printable(file), error)


def read_ahead(fd: int, ranges: Iterable[tuple[int, int]], *, is_stopped: Callable[[], bool]) -> int | None:
    """Read ranges of a file and discard them; what is in the page cache already is mostly skipped.

    Args:
        fd: Open for reading.
        ranges: Half-open, in bytes.
        is_stopped: Asked before each block.

    Returns:
        The first byte that could not be read because the file ends before it; None if all are there.

    Raises:
        CancelledError: If `is_stopped` says so.
        OSError: If the file cannot be read.
    """
    scratch = memoryview(b"")
    for begin, end in ranges:
        for at in range(begin, end, _BLOCK_BYTES):
            if is_stopped():
                raise CancelledError("read-ahead: stopped")
            last = min(at + _BLOCK_BYTES, end) - 1
            if is_cached(fd, at) and is_cached(fd, last):
                continue
            scratch = scratch or memoryview(bytearray(_BLOCK_BYTES))
            got = read_at(fd, at, scratch[: last + 1 - at])
            if got != last + 1 - at:
                return at + got
    return None


def is_cached(fd: int, offset: int) -> bool:
    """Whether a byte of the file can be had without the disk; False where the kernel cannot tell."""
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return False
    try:
        return os.preadv(fd, [bytearray(1)], offset, nowait) == 1
    except OSError:
        # EAGAIN: not there. Anything else: a file system without this question.
        return False
