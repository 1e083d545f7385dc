"""Reads files front to back in the background and discards them: the page cache is warm when they are needed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from weightwire.transfer.checkpoint.regular_files import opened_regular, printable, read_at
from weightwire.transfer.errors import CheckpointError, SettingsError

_LOG = logging.getLogger(__name__)

DEFAULT_THREADS = 4
DEFAULT_BLOCK_BYTES = 16 << 20
STOP_TIMEOUT_S = 60.0

ReadBlock = Callable[[int, int, memoryview], int]


def share_of_rank(files: Sequence[Path], *, local_rank: int, local_size: int) -> tuple[Path, ...]:
    """The files that one rank of a node warms; the page cache is the node's, so its ranks share the work.

    Args:
        files: All files of the checkpoint, in any order.
        local_rank: Number of the rank on its node, from 0.
        local_size: Ranks on the node.
    """
    if not 0 <= local_rank < local_size:
        raise ValueError(f"prefetch: local rank {local_rank} of {local_size} ranks on the node")
    return tuple(sorted(files)[local_rank::local_size])


class Prefetch:
    """Threads that warm the page cache, from construction on. Its owner ends it: `stop`, or the end of a `with` block.

    What goes wrong here is no reason to fail a load: the load reads the same files and finds out itself.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        threads: int = DEFAULT_THREADS,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        read_block: ReadBlock = read_at,
    ) -> None:
        """
        Args:
            files: In the order in which to read them.
            threads: At most so many files are read at once.
            block_bytes: One read; what a cancel waits for.
            read_block: Fills a buffer from an open file at an offset; returns the bytes read, 0 at the end.

        Raises:
            SettingsError: If `threads` or `block_bytes` is below 1.
        """
        for name, value in (("prefetch_threads", threads), ("prefetch_block_bytes", block_bytes)):
            if value < 1:
                raise SettingsError(f"reader option {name!r}: is {value}, expected at least 1", option=name)
        self._waiting = deque(files)
        self._block_bytes = block_bytes
        self._read_block = read_block
        self._stop = threading.Event()
        self._errors = list[tuple[Path, Exception]]()
        self._sound_ends = 0
        self._interrupted = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"weightwire-prefetch-{number}", daemon=True)
            for number in range(min(threads, len(files)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether all threads have ended, in whatever way."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def cancelled(self) -> bool:
        """Whether a cancel left something unread."""
        return self._interrupted

    @property
    def errors(self) -> tuple[tuple[Path, Exception], ...]:
        """Files that could not be read, and why."""
        with self._lock:
            return tuple(self._errors)

    @property
    def failed(self) -> bool:
        """Whether a file could not be read, or a thread ended without having come to its end."""
        with self._lock:
            ended_sound = self._sound_ends
        return bool(self.errors) or (self.done and ended_sound < len(self._threads))

    def cancel(self) -> None:
        """Start no more files, and leave those that are being read at the next block."""
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all threads have ended.

        Raises:
            TimeoutError: If some are still running after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not self.done:
            raise TimeoutError(f"prefetch: still running after {timeout_s} s")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """`cancel`, then `wait`.

        Raises:
            TimeoutError: As `wait`.
        """
        self.cancel()
        self.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        buffer = memoryview(bytearray(self._block_bytes))
        while (file := self._next()) is not None:
            try:
                self._warm(file, buffer)
            except (OSError, CheckpointError) as error:
                _LOG.debug("file %r: prefetch failed: %s", printable(file), error)
                with self._lock:
                    self._errors.append((file, error))
        with self._lock:
            self._sound_ends += 1

    def _next(self) -> Path | None:
        with self._lock:
            if self._stop.is_set():
                self._interrupted = self._interrupted or bool(self._waiting)
                return None
            return self._waiting.popleft() if self._waiting else None

    def _warm(self, file: Path, buffer: memoryview) -> None:
        with opened_regular(file) as (fd, identity):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            offset = 0
            while offset < identity.size:
                if self._stop.is_set():
                    self._interrupted = True
                    return
                got = self._read_block(fd, offset, buffer)
                if got == 0:
                    return
                offset += got
