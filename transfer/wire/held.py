"""What a target that serves while it receives already holds: verified bytes, and waiting for the others.

A byte counts once the chunk that it lies in has the digest that the origin published: what a stream's own checksum has
proven is only what the last sender had. So nothing that went wrong on the way is handed on.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from weightwire.transfer.errors import SourceError, SourceStalledError
from weightwire.transfer.integrity import checksum, digest_at
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.regions import Region
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.framing import Frame

# Longer than a reader's own watchdog takes to find another source, so that one loss does not tear down a whole chain.
PATIENCE_S = 10.0


class Held:
    """The part of a manifest's flat space that is verified. Thread-safe.

    Attributes:
        manifest: Adopted from the origin, digests and all; the shells' layout is exactly its.
    """

    def __init__(
        self,
        shells: Shells,
        manifest: Manifest,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        shells: Read where a chunk was put together of pieces.
        manifest: Describes them; has digests.
        patience_s: How long a reader waits without anything new.
        """
        self.manifest = manifest
        self._shells = shells
        self._patience_s = patience_s
        self._clock = clock
        self._proven = IntervalSet()
        self._pieces = IntervalSet()
        self._is_complete = False
        self._error: SourceError | None = None
        self._news_at = clock()
        self._changed = threading.Condition()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is verified, and was found whole."""
        return self._is_complete

    def add(self, manifest: str, places: Iterable[tuple[Region, int, int]], chunks: Sequence[int]) -> None:
        """Take bytes that a stream has verified and written.

        Args:
            manifest: Digest of the source's.
            places: Of the flat space, each with the bytes `begin` to `end` of its row-major order.
            chunks: Of the source's manifest, compared with its digests.
        """
        boxes = [box for region, begin, end in places for box in region.packed(begin, end) if box.numel]
        known = set(chunks) if manifest == self.manifest.digest else set[int]()
        for whole in self._put_together(boxes):
            # Hashed without the lock: readers of other chunks go on.
            if whole in known or self._is_good(whole):
                self._prove(whole)

    def complete(self) -> None:
        """Take all of it: the transfer is over, and every digest was compared."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def fail(self, error: SourceError) -> None:
        """Let everybody who waits go, with this error: what is not there will never come."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait_for(self, begin: int, end: int, timeout_s: float) -> bool:
        """Wait until bytes `begin` to `end` of the flat space are verified; False if they are not in time.

        Raises:
            SourceStalledError: If nothing new has come for too long, whoever asked how often.
            SourceError: As given to `fail`.
        """
        return self._wait([(begin, end)], timeout_s)

    def wait_for_frame(self, frame: Frame, timeout_s: float) -> bool:
        """The same for all that a frame carries."""
        if self._is_complete:
            return True
        boxes = (box for part in frame.parts for box in part.region.packed(part.begin, part.end))
        return self._wait([_extent(box) for box in boxes if box.numel], timeout_s)

    def _wait(self, wanted: Sequence[tuple[int, int]], timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._holds(wanted), timeout=timeout_s)
            # What is there stays good, even if the rest will not come.
            if self._holds(wanted):
                return True
            if self._error is not None:
                raise self._error
            silent_s = self._clock() - self._news_at
            if silent_s >= self._patience_s:
                raise SourceStalledError(f"it is still receiving, and nothing new has come for {silent_s:.1f} s")
            return False

    def _holds(self, wanted: Sequence[tuple[int, int]]) -> bool:
        return self._is_complete or all(self._proven.covers(*interval) for interval in wanted)

    def _prove(self, chunk: int) -> None:
        bounds = self.manifest.chunk_bounds
        with self._changed:
            self._proven.add(bounds[chunk], bounds[chunk + 1])
            self._news_at = self._clock()
            self._changed.notify_all()

    def _put_together(self, boxes: Sequence[Region]) -> list[int]:
        """The chunks that these pieces make whole, and that are not proven yet."""
        bounds = self.manifest.chunk_bounds
        with self._changed:
            for box in boxes:
                self._pieces.add_region(box)
            touched = {
                chunk
                for box in boxes
                for chunk in range(bisect_right(bounds, box.offset) - 1, bisect_left(bounds, box.end))
            }
            return [
                chunk
                for chunk in sorted(touched)
                if self._pieces.covers(bounds[chunk], bounds[chunk + 1])
                and not self._proven.covers(bounds[chunk], bounds[chunk + 1])
            ]

    def _is_good(self, chunk: int) -> bool:
        bounds = self.manifest.chunk_bounds
        actual = checksum(self._shells.views(bounds[chunk], bounds[chunk + 1]))
        return actual == digest_at(self.manifest.chunk_digests, chunk)


def _extent(box: Region) -> tuple[int, int]:
    """From its first byte to behind its last: of a strided box more than it has, which is no harm to wait for."""
    return box.offset, box.end
