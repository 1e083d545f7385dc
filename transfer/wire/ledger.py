"""Who fetches what: the segments of a plan that are waiting, out, or verified. No I/O.

A segment has one owner at a time. An owner that fails gives back what it has not verified, after its socket is
closed, so that a late byte can never land on verified ones.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weightwire.transfer.manifest import Manifest
from weightwire.transfer.plan import Copy
from weightwire.transfer.regions import Region

# A claim is made of pieces of this size, or smaller ones where there is less to share out: small enough that the
# streams finish together, large enough that a request's round trip does not show.
_PIECE_BYTES = 16 << 20
_PIECES_PER_STREAM = 4
# Below this not even the last bytes are worth sharing.
_MIN_CLAIM_BYTES = 1 << 20
# Above this one slow source would hold too much.
_MAX_CLAIM_BYTES = 512 << 20
# Keeps a request below the size that a source takes, however small the segments are.
_MAX_CLAIM_SEGMENTS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The unit of a claim: packed bytes of one source box, and where they go.

    Attributes:
        source: Flat region of the source, in bytes.
        target: Flat region of the target that the packed bytes belong to.
        begin: Position in `target`'s row-major order at which they begin.
        nbytes: How many.
    """

    source: Region
    target: Region
    begin: int
    nbytes: int


def cut_segments(manifest: Manifest, copies: Sequence[Copy], *, num_streams: int) -> Iterator[Segment]:
    """Cut copies into pieces for so many streams: at the manifest's chunk bounds, or where strided into boxes."""
    share = sum(copy.nbytes for copy in copies) // (_PIECES_PER_STREAM * num_streams)
    piece_bytes = min(max(share, manifest.chunk_bytes), _PIECE_BYTES)
    for copy in copies:
        if copy.source.is_contiguous:
            base = copy.source.offset
            for begin, end in _runs(manifest, base, base + copy.nbytes, piece_bytes):
                source = Region(offset=begin, shape=(end - begin,), strides=(1,))
                yield Segment(source=source, target=copy.target, begin=begin - base, nbytes=end - begin)
            continue
        for begin in range(0, copy.nbytes, piece_bytes):
            at = begin
            for box in copy.source.packed(begin, min(begin + piece_bytes, copy.nbytes)):
                yield Segment(source=box, target=copy.target, begin=at, nbytes=box.numel)
                at += box.numel


def _runs(manifest: Manifest, begin: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Flat bytes `begin` to `end` cut at the last chunk bound within each `piece_bytes`, or at the first one behind."""
    bounds = manifest.chunk_bounds
    while begin < end:
        at = bisect_right(bounds, begin + piece_bytes) - 1
        stop = min(end, bounds[at] if bounds[at] > begin else bounds[at + 1])
        yield begin, stop
        begin = stop


def _unverified(claim: Iterable[Segment], verified_bytes: int) -> Iterator[Segment]:
    """What is left of a claim whose first bytes are verified; a segment may be so in part."""
    for segment in claim:
        done = min(verified_bytes, segment.nbytes)
        verified_bytes -= done
        at = segment.begin + done
        for box in segment.source.packed(done, segment.nbytes):
            yield Segment(source=box, target=segment.target, begin=at, nbytes=box.numel)
            at += box.numel


class Ledger:
    """The segments that sources of one manifest share. Thread-safe."""

    def __init__(self, segments: Iterable[Segment], *, num_streams: int, most_bytes: int = _MAX_CLAIM_BYTES) -> None:
        """Args:
        most_bytes: Of a claim. A source refuses to send more at once than it holds, and a target that has an expert
            in several slots wants some of it several times.
        """
        self._waiting = deque(segments)
        self._waiting_bytes = sum(segment.nbytes for segment in self._waiting)
        self._out = 0
        self._num_streams = num_streams
        self._most_bytes = min(most_bytes, _MAX_CLAIM_BYTES)
        self._changed = threading.Condition()
        self._closed = False

    @property
    def is_done(self) -> bool:
        """True if every segment was verified."""
        return not self._waiting and not self._out

    def claim(self, *, timeout_s: float) -> list[Segment]:
        """Take the next segments; waits while none is left to take but some are out, since they may come back.

        Large claims at first and smaller ones towards the end, so that the streams finish together.

        Returns:
            Segments in the order of the source's flat space; none when all are verified, the ledger was closed,
            or the time is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_done or self._closed, timeout=timeout_s)
            if self._closed:
                return []
            share = self._waiting_bytes * 7 // (8 * self._num_streams)
            limit = min(max(share, _MIN_CLAIM_BYTES), self._most_bytes)
            taken: list[Segment] = []
            size = 0
            while self._waiting and (
                not taken or (len(taken) < _MAX_CLAIM_SEGMENTS and size + self._waiting[0].nbytes <= limit)
            ):
                taken.append(self._waiting.popleft())
                size += taken[-1].nbytes
            self._waiting_bytes -= size
            self._out += len(taken)
            return taken

    def settle(self, claim: Sequence[Segment], *, verified_bytes: int) -> None:
        """End a claim of which the first `verified_bytes` are done; the rest goes to whoever asks next."""
        back = list(_unverified(claim, verified_bytes))
        with self._changed:
            self._out -= len(claim)
            self._waiting.extendleft(reversed(back))
            self._waiting_bytes += sum(segment.nbytes for segment in back)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing any more and wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
