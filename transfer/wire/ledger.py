"""Who fetches what: the segments of a plan that are waiting, out, or verified. No I/O.

A segment has one owner at a time. An owner that fails gives back what it has not verified, after its socket is
closed, so that a late byte can never land on verified ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weightwire.transfer.manifest import Manifest
from weightwire.transfer.planning import Copy
from weightwire.transfer.regions import Region

# A strided copy is handed out in pieces of this size.
_STRIDED_PIECE_BYTES = 16 << 20
# Below this a request's round trip shows; above that one slow source holds too much.
_MIN_CLAIM_BYTES = 4 << 20
_MAX_CLAIM_BYTES = 256 << 20


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


def cut_segments(manifest: Manifest, copies: Iterable[Copy]) -> Iterator[Segment]:
    """Cut copies at the manifest's chunk bounds, or where strided into boxes of a bounded size."""
    for copy in copies:
        if copy.source.is_contiguous:
            base = copy.source.offset
            for begin, end, _ in manifest.chunks_between(base, base + copy.nbytes):
                source = Region(offset=begin, shape=(end - begin,), strides=(1,))
                yield Segment(source=source, target=copy.target, begin=begin - base, nbytes=end - begin)
            continue
        for begin in range(0, copy.nbytes, _STRIDED_PIECE_BYTES):
            at = begin
            for box in copy.source.packed(begin, min(begin + _STRIDED_PIECE_BYTES, copy.nbytes)):
                yield Segment(source=box, target=copy.target, begin=at, nbytes=box.numel)
                at += box.numel


class Ledger:
    """The segments that sources of one manifest share. Thread-safe."""

    def __init__(self, segments: Iterable[Segment], *, num_streams: int) -> None:
        self._waiting = deque(segments)
        self._waiting_bytes = sum(segment.nbytes for segment in self._waiting)
        self._out = 0
        self._num_streams = num_streams
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
            share = self._waiting_bytes // (2 * self._num_streams)
            limit = min(max(share, _MIN_CLAIM_BYTES), _MAX_CLAIM_BYTES)
            taken: list[Segment] = []
            size = 0
            while self._waiting and (not taken or size + self._waiting[0].nbytes <= limit):
                taken.append(self._waiting.popleft())
                size += taken[-1].nbytes
            self._waiting_bytes -= size
            self._out += len(taken)
            return taken

    def settle(self, *, verified: int, returned: Iterable[Segment] = ()) -> None:
        """End a claim: `verified` segments are done, `returned` ones go to whoever asks next."""
        with self._changed:
            back = list(returned)
            self._out -= verified + len(back)
            self._waiting.extendleft(reversed(back))
            self._waiting_bytes += sum(segment.nbytes for segment in back)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing any more and wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
