"""What one stream has taken from the ledger, and how fast it is: the figures that sharing is decided by. No I/O.

A claim is read by one thread and may be cut short by others, without a lock for each frame: the reader says that it
begins a frame before it looks where it has to stop, and whoever cuts says where to stop before looking which frame has
begun. One of the two always sees the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final

from weightwire.transfer.manifest import Manifest
from weightwire.transfer.wire.framing import cut_frames
from weightwire.transfer.wire.segments import Segment, merged_regions, part_of

# How fast a stream was this long ago counts half of how fast it is now.
_HALF_LIFE_S = 0.5
# A latency that is believed without having been measured.
_UNSURE_S = 0.1


class Reader:
    """A stream as the ledger sees it.

    Attributes:
        source: Tells the streams of one source from those of others.
        rate: Bytes per second while it had a claim; 0 until it has ended one.
        latency_s: How long a request takes to be answered, roughly.
    """

    __slots__ = ("_nbytes", "_seconds", "latency_s", "rate", "source")

    def __init__(self, source: object) -> None:
        self.source: Final = source
        self.rate = self.latency_s = 0.0
        self._nbytes = self._seconds = 0.0

    def learn(self, nbytes: int, seconds: float) -> None:
        """Take a claim's figures into account; older ones fade."""
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        self._nbytes = self._nbytes * kept + nbytes
        self._seconds = self._seconds * kept + seconds
        if self._nbytes and self._seconds:
            self.rate = self._nbytes / self._seconds


class Claim:
    """Segments on their way through one stream.

    Attributes:
        segments: As they are asked for, in order.
        owned: Bytes of them, from the first, that are still this claim's. The ledger's to change.
        done: Bytes of the frames that have come, good or damaged. The reader's to change.
        damaged: Packed positions of the frames that came damaged.
    """

    def __init__(
        self, reader: Reader, segments: Sequence[Segment], manifest: Manifest, clock: Callable[[], float]
    ) -> None:
        self.reader = reader
        self.segments = segments
        self.owned = sum(segment.nbytes for segment in segments)
        self.done = 0
        self.damaged: list[tuple[int, int]] = []
        self._clock = clock
        self._since = clock()
        self._first_frame = (self._since, 0)
        self._manifest = manifest
        self._begun = 1
        self._stop_at = sys.maxsize

    # -- the reader's side ----------------------------------------------------------------------------------------

    def ended(self, nbytes: int, *, is_good: bool = True) -> bool:
        """Take down that a frame has come; before the next one begins.

        Returns:
            Whether the next one may begin, if there is one. If not, its first byte must not be read.
        """
        if not is_good:
            self.damaged.append((self.done, self.done + nbytes))
        self.done += nbytes
        if self._begun == 1:
            self._first_frame = (self._clock(), nbytes)
        self._begun += 1
        return self._begun <= self._stop_at

    @property
    def verified(self) -> list[tuple[int, int]]:
        """Packed positions of what has come and is good, ascending."""
        found, at = list[tuple[int, int]](), 0
        for begin, end in [*self.damaged, (self.done, self.done)]:
            if at < begin:
                found.append((at, begin))
            at = end
        return found

    # -- the ledger's side ----------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Tell its reader how fast it went, once it is over."""
        now = self._clock()
        at, nbytes = self._first_frame
        if self.done > nbytes:
            self.reader.latency_s = max(0.0, at - self._since - nbytes * (now - at) / (self.done - nbytes))
        elif self.done:
            # One frame does not tell waiting from reading.
            self.reader.latency_s = min((now - self._since) / 2, _UNSURE_S)
        self.reader.learn(self.done, now - self._since)

    def left(self) -> tuple[int, float]:
        """Bytes that are still to come, and the rate at which they seem to come, in bytes per second.

        A stream that has said nothing for long is taken to be as slow as if its frame came now.
        """
        most = self.done + min(self._manifest.chunk_bytes, self.owned)
        seen = most / max(self._clock() - self._since, 1e-9)
        return self.owned - self.done, min(self.reader.rate, seen) if self.reader.rate else seen

    def cuts(self) -> list[int]:
        """Packed positions at which it can be cut now, ascending: ends of frames, from that of the one begun last."""
        return [end for end in self._bounds[self._begun - 1 :] if end < self.owned]

    def cut(self, at: int) -> list[Segment] | None:
        """Take away what lies behind `at`, which is one of `cuts`.

        Returns:
            That, to be asked for elsewhere; None if its reader was faster.
        """
        frames = self._bounds.index(at) + 1
        before, self._stop_at = self._stop_at, frames
        if self._begun > frames:
            # Perhaps it goes on, perhaps it has just seen that it should not: either way the rest stays its own.
            self._stop_at = before
            return None
        taken = list(part_of(self.segments, at, self.owned))
        self.owned = at
        return taken

    def end_soon(self) -> None:
        """Let its reader stop after the frame that it is in, and give back the rest when it settles."""
        self._stop_at = 0

    def unverified(self) -> list[Segment]:
        """What has to be asked for again, in order."""
        spans = [*self.damaged, (self.done, self.owned)]
        return [segment for begin, end in spans for segment in part_of(self.segments, begin, end)]

    @cached_property
    def _bounds(self) -> list[int]:
        """The packed positions at which its frames end."""
        frames = cut_frames(self._manifest, merged_regions(self.segments))
        return list(accumulate(frame.nbytes for frame in frames))
